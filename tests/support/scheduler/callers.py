"""A file of keys with a caller of each kind, for tests of access."""

from pathlib import Path

from scheduler.identity.identity import Identity, Role
from scheduler.identity.key_file import add_key
from scheduler.identity.verifier import Verifier
from scheduler.servers.access import Access
from scheduler.servers.refusals import Refusals

ROLES = {
    "generate": frozenset({Role.GENERATE}),
    "observe": frozenset({Role.OBSERVE}),
    "admin": frozenset({Role.ADMIN}),
}
WRONG = "qk_" + "x" * 43


class Callers:
    """`keys` holds a key for each caller: "none" sends nothing, "wrong" an unknown key, the others have that role."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "keys.json")
        self.keys: dict[str, str | None] = {"none": None, "wrong": WRONG}
        for name, roles in ROLES.items():
            self.keys[name] = add_key(self.path, Identity(f"the-{name}", f"tenant-of-{name}", roles))
        self.counted: list[str] = []

    def access(self) -> Access:
        return Access(Verifier(self.path), Refusals(self.counted.append))

    def header(self, caller: str) -> dict[str, str]:
        key = self.keys[caller]
        return {} if key is None else {"authorization": f"Bearer {key}"}

    def metadata(self, caller: str) -> tuple[tuple[str, str], ...]:
        return tuple(self.header(caller).items())
