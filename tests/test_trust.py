"""Who else may write to what is run as code: modes, groups, access control lists; what is loaded stays as it was."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import grp
import itertools
import os
import pwd
import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tvm_sparse.artifacts import trust

ROOT = os.geteuid() == 0
ME = 70010 if ROOT else os.geteuid()  # root can be anybody
OWNER, USER, OWNING_GROUP, GROUP, MASK, OTHERS = 1, 2, 4, 8, 16, 32
NOBODY = 0xFFFFFFFF
ACL = "system.posix_acl_access"
OWN, SHARED = 70001, 70002  # groups


@dataclass
class Accounts:
    """The users of a machine and its groups: a user's id and primary group by name, a group's id and list by name."""

    users: dict[str, tuple[int, int]]
    groups: dict[str, tuple[int, Sequence[str]]]
    hidden: tuple[str, ...] = ()  # users whom a directory service knows, and does not list


@pytest.fixture
def accounts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accounts]:
    """This user, root and two others; the first group is this user's own."""
    found = Accounts(
        {"root": (0, 0), "me": (ME, OWN), "ann": (70011, 70003), "bob": (70012, 70004)},
        {"me": (OWN, ()), "lab": (SHARED, ("me", "ann")), "ann": (70003, ()), "bob": (70004, ())},
    )

    def user(name: str) -> pwd.struct_passwd:
        number, group = found.users[name]
        return pwd.struct_passwd((name, "x", number, group, "", "/", "/bin/sh"))

    def group(name: str) -> grp.struct_group:
        number, members = found.groups[name]
        return grp.struct_group((name, "x", number, list(members)))

    def one(numbers: Mapping[str, tuple[int, object]], number: int) -> str:
        return next((name for name, (own, _) in numbers.items() if own == number), "")

    monkeypatch.setattr(pwd, "getpwnam", user)
    monkeypatch.setattr(pwd, "getpwuid", lambda number: user(one(found.users, number)))
    monkeypatch.setattr(pwd, "getpwall", lambda: [user(name) for name in found.users if name not in found.hidden])
    monkeypatch.setattr(grp, "getgrgid", lambda number: group(one(found.groups, number)))
    monkeypatch.setattr(os, "geteuid", lambda: ME)
    clear = trust._own_group.cache_clear
    clear()
    yield found
    clear()


def acl(*entries: tuple[int, int, int], version: int = 2) -> bytes:
    return struct.pack("<I", version) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def set_acl(path: Path, *entries: tuple[int, int, int]) -> None:
    """An access control list beside what owner, owning group and others may do: the kernel wants them in order."""
    mode = path.stat().st_mode
    group = mode >> 3 & 7
    whole = [(OWNER, mode >> 6 & 7, NOBODY), (OWNING_GROUP, group, NOBODY), (OTHERS, mode & 7, NOBODY), *entries]
    if entries and not any(tag == MASK for tag, _, _ in entries):
        whole.append((MASK, 7, NOBODY))
    try:
        os.setxattr(path, ACL, acl(*sorted(whole)))
    except OSError as error:
        pytest.skip(f"this file system has no access control lists: {error.strerror}")


def drop_acl(path: Path) -> None:
    with contextlib.suppress(OSError):  # it has none
        os.removexattr(path, ACL)


def refused(path: Path) -> str:
    """Why a file is refused; empty if it is not. It is as well where it is read, as the open file."""
    text = ""
    try:
        (trust.check_folder if path.is_dir() else trust.check_file)(path)
    except trust.Refused as error:
        text = str(error)
    if path.is_file():
        try:
            trust.read(path, 100)
            assert not text
        except trust.Refused as error:
            assert str(error) == text
    return text


@pytest.fixture(params=["folder", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "place"
    path.mkdir() if request.param == "folder" else path.touch()
    path.chmod(0o755)
    if ROOT:
        os.chown(path, ME, -1)
    return path


@pytest.mark.parametrize(
    ("entry", "mode", "who"),
    [
        ((USER, 7, 70011), 0o755, "user 70011, whom its access control list names"),
        ((USER, 2, 70011), 0o700, "user 70011, whom its access control list names"),
        ((USER, 5, 70011), 0o755, ""),
        ((USER, 7, ME), 0o755, ""),
        ((USER, 7, 0), 0o755, ""),
        ((GROUP, 7, SHARED), 0o755, f"group {SHARED}, which its access control list names"),
        ((GROUP, 5, SHARED), 0o755, ""),
        ((GROUP, 7, OWN), 0o755, ""),
        ((GROUP, 7, 99999), 0o755, "group 99999, which its access control list names"),
    ],
)
def test_whom_an_access_control_list_lets_write(
    place: Path, accounts: Accounts, entry: tuple[int, int, int], mode: int, who: str
) -> None:
    place.chmod(mode)
    set_acl(place, entry)
    said = refused(place)
    assert (who in said and trust.TRUST in said) if who else not said
    place.chmod(place.stat().st_mode & 0o755)  # as the message says: that is the list's mask
    assert not refused(place)


def test_a_list_that_cannot_be_known_is_not_trusted(
    place: Path, accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: dict[str, bytes | int] = {}

    def getxattr(_: object, name: str) -> bytes:
        found = answers.get(name, errno.ENODATA)
        if isinstance(found, int):
            raise OSError(found, os.strerror(found))
        return found

    monkeypatch.setattr(os, "getxattr", getxattr)
    monkeypatch.setattr(trust, "_own_group", lambda group: True)
    owner = (OWNER, 7, NOBODY)
    for mode, unknown in ((0o775, True), (0o755, False)):  # without the group's bit nobody named may write
        place.chmod(mode)
        for name, found in (
            (ACL, errno.EACCES),
            (ACL, errno.EIO),
            (ACL, b""),
            (ACL, acl(owner, version=3)),
            (ACL, acl(owner) + b"\0"),
            (ACL, acl((64, 7, NOBODY))),
            ("system.nfs4_acl", b"any"),
            ("system.nfs4_acl", errno.EACCES),
        ):
            answers.clear()
            answers[name] = found
            assert ("cannot be read here" in refused(place)) == unknown
        for fine in (errno.ENODATA, errno.EOPNOTSUPP):
            answers.clear()
            answers[ACL] = answers["system.nfs4_acl"] = fine
            assert not refused(place)


@pytest.mark.parametrize(
    ("change", "trusted"),
    [
        (lambda a: None, True),
        (lambda a: a.groups.update(me=(OWN, ("me",))), True),
        (lambda a: a.users.update(toor=(0, OWN)), True),  # root may write anyway
        (lambda a: a.users.update(alias=(ME, OWN)), True),  # another name of this user
        (lambda a: a.groups.update(me=(OWN, ("ann",))), False),
        (lambda a: a.groups.update(me=(OWN, ("me", "ann"))), False),
        (lambda a: a.groups.update(me=(OWN, ("gone",))), False),  # whoever is given that name
        (lambda a: a.users.update(eve=(70013, OWN)), False),  # by primary group alone
        (lambda a: a.users.update(me=(ME, SHARED)), False),  # not this user's primary group
        (lambda a: a.groups.update(ours=a.groups.pop("me")), False),  # not named like this user
        (lambda a: a.groups.pop("me"), False),  # a number that no group has
        (lambda a: a.users.pop("me"), False),  # a user that nobody knows
        (lambda a: setattr(a, "hidden", ("me",)), False),  # others may be hidden as well
    ],
)
def test_which_group_is_this_users_own(place: Path, accounts: Accounts, change, trusted: bool) -> None:
    change(accounts)
    assert trust._own_group(OWN) == trusted
    trust._own_group.cache_clear()
    if ROOT:
        os.chown(place, -1, OWN)
        place.chmod(0o775)
        assert ("may be written by others" in refused(place)) != trusted
        place.chmod(0o755)
        assert not refused(place)


def test_drawn_files_are_trusted_only_if_nobody_else_may_write(place: Path, accounts: Accounts) -> None:
    """Against the rules of POSIX themselves, asked for each user of a drawn machine."""
    if not ROOT:
        pytest.skip("gives files to other groups, as root alone can")
    rng = random.Random(seed := random.SystemRandom().randrange(2**32))
    users, groups, seen = (70011, 70012), (OWN, SHARED, 70003), set()
    for _ in range(300):
        accounts.users.update(ann=(70011, rng.choice(groups)), bob=(70012, rng.choice((70004, *groups))))
        for name, number in (("me", OWN), ("lab", SHARED), ("ann", 70003)):
            accounts.groups[name] = number, rng.sample(("me", "ann", "bob"), rng.choice((0, 0, 1)))
        trust._own_group.cache_clear()
        drop_acl(place)
        os.chown(place, -1, rng.choice(groups))
        place.chmod(rng.choice((0o755, 0o775, 0o775, 0o757, 0o750)))
        named = rng.sample([*((USER, n) for n in (*users, ME)), *((GROUP, n) for n in groups)], rng.randrange(4))
        entries = [(tag, rng.choice((5, 7)), number) for tag, number in named]
        if entries:
            set_acl(place, *entries, *([(MASK, rng.choice((5, 7)), NOBODY)] if rng.random() < 0.5 else []))
        able = [name for name in ("ann", "bob") if may_write(place, name, accounts)]
        said = refused(place)
        assert said or not able, (seed, able, entries, oct(place.stat().st_mode), accounts)
        # Beyond that is refused: what only keeps those out whom it names, and a group without members that is not this
        # user's own.
        if said and not any(may_write(place, name, accounts, first=False) for name in ("ann", "bob")):
            assert any(f"group {number}" in said for number in groups[1:]), (seed, said, accounts)
        seen.add((bool(said), bool(able)))
    assert {(True, True), (False, False)} <= seen


def may_write(path: Path, name: str, accounts: Accounts, first: bool = True) -> bool:
    """acl(5), "Access check algorithm", for a user who is not the owner: what the first rule that is about a user says,
    or whether any does."""
    number, primary = accounts.users[name]
    found = path.stat()
    member = {primary, *(n for n, members in accounts.groups.values() if name in members)}
    try:
        entries = list(struct.iter_unpack("<HHI", os.getxattr(path, ACL)[4:]))
    except OSError:
        mode = found.st_mode
        entries = [(OWNING_GROUP, mode >> 3 & 7, NOBODY), (OTHERS, mode & 7, NOBODY)]
    mask = next((permissions for tag, permissions, _ in entries if tag == MASK), 7)
    named = [permissions & mask for tag, permissions, own in entries if tag == USER and own == number]
    by_group = [
        permissions & mask
        for tag, permissions, own in entries
        if (tag == GROUP and own in member) or (tag == OWNING_GROUP and found.st_gid in member)
    ]
    rules = [rule for rule in (named, by_group, [p for tag, p, _ in entries if tag == OTHERS]) if rule]
    return any(permissions & 2 for rule in (rules[:1] if first else rules) for permissions in rule)


def test_what_is_loaded_cannot_be_changed_any_more() -> None:
    """Any process of this user could open the descriptor; the seals hold for all of them, and stay."""
    content = b"\x7fELF" + bytes(1000)
    with trust.loadable("library.so", content) as place:
        assert place.startswith("/proc/self/fd/") and Path(place).read_bytes() == content
        number = int(place.rpartition("/")[2])
        for change in (
            lambda file: os.pwrite(file, b"other", 0),
            lambda file: os.ftruncate(file, 4),
            lambda file: os.ftruncate(file, 2000),
            lambda file: fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL),
        ):
            for file in (number, again := os.open(place, os.O_RDWR)):
                with pytest.raises(PermissionError):
                    change(file)
            os.close(again)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3,
                                                                  ctypes.c_long]  # fmt: skip
        shared, writable = 1, 2 | 1  # MAP_SHARED, PROT_READ | PROT_WRITE
        assert libc.mmap(None, 1000, writable, shared, number, 0) == ctypes.c_void_p(-1).value
        assert Path(place).read_bytes() == content
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_loaded_libraries_keep_no_descriptor_and_have_names_of_their_own() -> None:
    """A process may load more libraries than it may open files, and the loader takes equal names for one library."""
    places = []
    for content in (b"one", b"other", b"third"):
        with trust.loadable("library.so", content) as place:
            assert Path(place).read_bytes() == content
            places.append(place)
    assert len({place.rpartition("/")[2] for place in places}) == 1 and len(set(places)) == 3


def test_without_sealed_memory_what_is_loaded_is_a_private_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with trust.loadable("library.so", b"content") as place:
        assert Path(place).read_bytes() == b"content" and Path(place).parent.stat().st_mode & 0o777 == 0o700
    assert not Path(place).exists()


def test_modes_of_all_kinds(place: Path, accounts: Accounts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_own_group", lambda group: False)
    for own, group, others in itertools.product((6, 7), (0, 5, 2, 7), (0, 5, 2, 7)):
        place.chmod(own << 6 | group << 3 | others)
        assert bool(refused(place)) == bool((group | others) & 2)
