"""What pyproject.toml cannot say: a wheel has the notebooks, and the page that they link, inside
of the package, and the folder kernels/ under another name, for Hugging Face's `kernels` may lie
beside it."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py


class WithNotebooks(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # they are beside the package
            return
        for file in [*sorted(Path("notebooks").glob("*.ipynb")), Path("docs", "REAL_ENGINES.md")]:
            target = Path(self.build_lib, "minikv", file)
            target.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(file), str(target))


setup(
    packages=[*find_packages(include=["minikv*"]), "minikv_kernels"],
    package_dir={"minikv_kernels": "kernels"},
    cmdclass={"build_py": WithNotebooks},
)
