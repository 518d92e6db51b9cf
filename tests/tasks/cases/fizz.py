"""Follow a specification of two lines."""

from pathlib import Path

from judging import changed, wrong_value

PROMPT = "Read spec.txt and do what it says."
START = {
    "spec.txt": """\
Write fizz.py with a function fizz(n) that returns the list of the texts for 1 to n: "Fizz" for multiples of 3, "Buzz"
for multiples of 5, "FizzBuzz" for multiples of both, and the number as text for all others.
"""
}
SOLUTION = {
    "fizz.py": """\
def fizz(n):
    words = {(True, True): "FizzBuzz", (True, False): "Fizz", (False, True): "Buzz"}
    return [words.get((i % 3 == 0, i % 5 == 0), str(i)) for i in range(1, n + 1)]
"""
}
WRONG = {"numbers": {"fizz.py": SOLUTION["fizz.py"].replace("str(i)", "i")}}


def check(workspace: Path, answer: str) -> str:
    """The first fifteen, and none."""
    first = ["1", "2", "Fizz", "4", "Buzz", "Fizz", "7", "8", "Fizz", "Buzz", "11", "Fizz", "13", "14", "FizzBuzz"]
    return wrong_value(workspace, "fizz", {"fizz(15)": first, "fizz(0)": []}) or changed(workspace, START)
