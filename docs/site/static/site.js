// What scrolls can be reached with the keyboard, also once a fold is open; and what a prediction
// folds is open on paper.
const MAY_SCROLL = ".highlight pre, .exercise pre, article table, article [style*='overflow']";
const reach = () => {
  for (const box of document.querySelectorAll(MAY_SCROLL)) {
    const scrolls = box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight;
    if (scrolls) box.tabIndex = 0;
  }
};
addEventListener("load", reach);
addEventListener("toggle", reach, true);
addEventListener("beforeprint", () => {
  for (const fold of document.querySelectorAll("details.hide")) fold.open = true;
});
// An excerpt of the search is the page's own text, without the theme's buttons.
addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;
  Search.htmlToText = (html) => {
    const page = new DOMParser().parseFromString(html, "text/html");
    for (const one of page.querySelectorAll(".headerlink, script, style")) one.remove();
    return page.querySelector("article.bd-article")?.textContent ?? "";
  };
});
