"""Run a program that fails, repair what is reported, and run it again: a second mistake hides behind the first."""

from pathlib import Path

from judging import wrong_output

PROMPT = (
    "`python3 report.py` fails. Run it, repair report.py, and run it again until it works: it must print the sum of"
    ' the amounts in sales.txt, as "total: SUM".'
)
START = {
    "sales.txt": "apples 10\npears 20\nplums 30\n",
    "report.py": """\
def read_sales(path)
    sales = {}
    with open(path) as file:
        for line in file:
            name, amount = line.split()
            sales[name] = amount
    return sales


def main():
    sales = read_sales("sales.txt")
    print("total:", sum(sales.values()))


main()
""",
}
SOLUTION = {
    "report.py": START["report.py"].replace("(path)\n", "(path):\n").replace("= amount\n", "= int(amount)\n"),
}
WRONG = {
    "only the first mistake": {"report.py": START["report.py"].replace("(path)\n", "(path):\n")},
    "prints a constant": {"report.py": 'print("total: 60")\n'},
}


def check(workspace: Path, answer: str) -> str:
    """The sum of these sales, then of others."""
    for sales, total in ((START["sales.txt"], 60), ("nuts 7\nfigs 5\n", 12)):
        (workspace / "sales.txt").write_text(sales)
        if problem := wrong_output(workspace, f"total: {total}", "report.py"):
            return problem
    return ""
