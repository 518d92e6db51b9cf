"""Write tests for a module, one of them for a case that is named."""

from pathlib import Path

from judging import changed, last_line, run

PROMPT = (
    "Would you write unit tests for pages.py, please? Use unittest and put them into test_pages.py. I would like at"
    " least one in which the last page is not full. Run them when you are done, they should all pass."
)
START = {
    "pages.py": """\
def page_count(items, per_page):
    return (items + per_page - 1) // per_page
"""
}
SOLUTION = {
    "test_pages.py": """\
import unittest

from pages import page_count


class PageCountTest(unittest.TestCase):
    def test_full_pages(self):
        self.assertEqual(page_count(20, 10), 2)

    def test_last_page_not_full(self):
        self.assertEqual(page_count(21, 10), 3)


if __name__ == "__main__":
    unittest.main()
"""
}
WRONG = {
    "no test": {"test_pages.py": "import unittest\n\nfrom pages import page_count\n"},
    "one fails": {"test_pages.py": SOLUTION["test_pages.py"].replace("10), 3)", "10), 2)")},
    "full pages only": {
        "test_pages.py": SOLUTION["test_pages.py"].replace("page_count(21, 10), 3", "page_count(30, 10), 3")
    },
    "never called": {"test_pages.py": SOLUTION["test_pages.py"].replace("self.assert", "return\n        self.assert")},
    "changes the module": {**SOLUTION, "pages.py": START["pages.py"].replace("- 1", "- 1 + 0")},
}
MISTAKES = {
    "leaves out the last page that is not full": "def page_count(items, per_page):\n    return items // per_page\n",
    "is always 1000": "def page_count(items, per_page):\n    return 1000\n",
}


def check(workspace: Path, answer: str) -> str:
    """They pass, and fail for each mistake put into pages.py."""
    if problem := changed(workspace, START):
        return problem
    if not (workspace / "test_pages.py").is_file():
        return "there is no test_pages.py"
    done = run(workspace, "-m", "unittest", "test_pages")
    if "Ran 0 tests" in done.stderr:
        return "there is no test in it"
    if done.returncode:
        return f"the tests fail: {last_line(done)}"
    for mistake, content in MISTAKES.items():
        (workspace / "pages.py").write_text(content)
        if not run(workspace, "-m", "unittest", "test_pages").returncode:
            return f"the tests pass although page_count {mistake}"
    return ""
