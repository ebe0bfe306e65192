// How search results are ordered: a title that has the words first, chapters before the reference.
var Scorer = {
  score: ([name, title, , , score]) => {
    const words = new URLSearchParams(location.search).get("q").toLowerCase().split(/\s+/);
    const named = words.every((word) => title.toLowerCase().includes(word));
    const chapter = /^(notebooks|docs\/GLOSSARY)/.test(name);
    return score + (named ? 40 : 0) + (chapter ? 12 : 0) - (name === "api" ? 10 : 0);
  },
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
