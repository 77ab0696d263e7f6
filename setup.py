"""What setup.cfg cannot say: the description on PyPI, and the project's addresses.

A page on PyPI has no folder beside it, so relative links of README.md lead nowhere there. They
become links into the repository, or plain text while its address is unknown.
"""

import re
from pathlib import Path

from setuptools import setup

# The address of the public repository, "https://HOST/OWNER/hvd_adaptive". Set it for a release.
REPOSITORY = ""
PAGES = {"Source": "", "Documentation": "/blob/main/docs/index.md", "Issues": "/issues"}
PAGES["Changelog"] = "/blob/main/CHANGELOG.md"
# [text](target) and ![text](target), whose target is no address and no place in the page.
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def description(readme: str, repository: str) -> str:
    """Return a README whose links work without the files beside it."""

    def replaced(link: "re.Match[str]") -> str:
        image, text, target = link.groups()
        if not repository:
            return "" if image else text
        folder = "raw" if image else "blob"
        return f"{image}[{text}]({repository}/{folder}/main/{target})"

    return RELATIVE.sub(replaced, readme)


if __name__ == "__main__":
    setup(
        long_description=description(
            (Path(__file__).parent / "README.md").read_text(encoding="utf-8"), REPOSITORY
        ),
        long_description_content_type="text/markdown",
        project_urls={name: REPOSITORY + path for name, path in PAGES.items()}
        if REPOSITORY
        else {},
    )
