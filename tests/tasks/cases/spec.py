"""Follow a specification that lies in the workspace."""

from pathlib import Path

from judging import changed, wrong_value

PROMPT = "Do what spec.txt says."
START = {
    "spec.txt": """\
Write account.py with a class Account:

Account(owner)       starts with a balance of 0
.owner, .balance     can be read
.deposit(amount)     adds to the balance; an amount of 0 or less raises ValueError
.withdraw(amount)    takes from the balance; an amount of 0 or less raises ValueError,
                     and so does one greater than the balance: it then stays as it is
"""
}
SOLUTION = {
    "account.py": """\
class Account:
    def __init__(self, owner):
        self.owner = owner
        self.balance = 0

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be greater than 0")
        self.balance += amount

    def withdraw(self, amount):
        if amount <= 0 or amount > self.balance:
            raise ValueError("the amount must be greater than 0 and no more than the balance")
        self.balance -= amount
"""
}
WRONG = {
    "takes amounts below 0": {"account.py": SOLUTION["account.py"].replace("if amount <= 0:", "if amount == 0:")},
    "takes it and raises": {
        "account.py": SOLUTION["account.py"]
        .replace(" or amount > self.balance", "")
        .replace("-= amount", "-= amount\n        if self.balance < 0:\n            raise ValueError")
    },
    "lets the balance go below 0": {"account.py": SOLUTION["account.py"].replace(" or amount > self.balance", "")},
}
ASK = "(lambda a: (a.deposit(10), {}, a.balance)[-1])(Account('Ann'))"


def check(workspace: Path, answer: str) -> str:
    """Each line of the specification."""
    expected = {
        "Account('Ann').owner": "Ann",
        "Account('Ann').balance": 0,
        ASK.format("None"): 10,
        ASK.format("a.deposit(5)"): 15,
        ASK.format("a.withdraw(4)"): 6,
        ASK.format("a.withdraw(10)"): 0,
        **{ASK.format(f"a.{what}"): "raises ValueError" for what in ("deposit(0)", "deposit(-1)", "withdraw(0)")},
        **{ASK.format(f"a.{what}"): "raises ValueError" for what in ("withdraw(-1)", "withdraw(11)")},
        ASK.format("__import__('unittest').TestCase().assertRaises(ValueError, a.withdraw, 11)"): 10,
    }
    return wrong_value(workspace, "account", expected) or changed(workspace, START)
