"""Signatures of exported folders, for folders whose files are not trusted by their owner or location.

manifest.json.sig
    format      version of this layout
    key         the signer's public key, as OpenSSH writes it
    files       sha256 of the manifest and of each file that it names, by its path in the folder
    signature   Ed25519 (Bernstein et al. 2012, "High-speed high-security signatures"; RFC 8032) of `files`, in base64

A signature says who vouches for the bytes, not what the code does. Keys are OpenSSH's, as `ssh-keygen -t ed25519` makes
them, or PEM. Checking and signing need the package cryptography, from the extra `sign`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import commands, scratch
from . import manifest, runtime_libraries, trust
from .manifest import ManifestError

FORMAT = 1
NAME = "manifest.json.sig"
MOST_BYTES = 1 << 24
# Prefix of the signed text, so that signatures made for other purposes are not valid here.
_PURPOSE = b"tvm_sparse: the files of a folder of kernels\n"
_KIND = "ssh-ed25519"


class SignatureError(ManifestError):
    """A folder is not signed by a trusted key, or a key cannot be used; the message says which and why."""


@dataclass(frozen=True, eq=False)
class Signed:
    """A folder with a valid signature: the signer's key, and the sha256 of each file by its path."""

    folder: Path
    key: str
    files: Mapping[str, str]

    def read(self, name: str, most: int) -> bytes:
        """Read one of its files, whoever owns it.

        Raises
        ------
        SignatureError
            If it differs from the signed file, is not a plain file, is larger than `most` bytes, or cannot be read.
        """
        path = self.folder / name
        try:
            content = trust.read(path, most, owned=False)
        except trust.Refused as error:
            raise SignatureError(str(error)) from None
        except OSError as error:
            raise SignatureError(f"{path}: {error.strerror or error}; get the folder again") from None
        if self.files.get(name) != hashlib.sha256(content).hexdigest():
            raise SignatureError(
                f"{path}: is not the file that {NAME} was made for: it was changed, or added, after the folder was"
                " signed; get the folder again, or sign it again"
            )
        return content


def is_signed(folder: Path) -> bool:
    """Whether a folder has a signature, valid or not."""
    return (folder / NAME).exists()


def sign(folder: Path, key: Any, also: Iterable[str] = ()) -> Path:
    """Sign a folder of kernels with a private key (`private_key`); returns the path of the signature.

    The signature covers the manifest, the files that it names, and those in `also`, but no other files of the folder.

    Raises
    ------
    ManifestError
        As in `manifest.read`; `SignatureError` if a file that it names is missing or differs.
    """
    try:
        content = trust.read(folder / manifest.NAME, manifest.MOST_BYTES, owned=False)
    except OSError as error:
        raise SignatureError(
            f"{folder / manifest.NAME}: {error.strerror or error}; export kernels into this folder first"
        ) from None
    described = {entry.library: entry.sha256 for entry in manifest.read(folder, content)}
    described |= {f"{runtime_libraries.FOLDER}/{name}": one for name, one in manifest.runtime(folder, content).items()}
    files = {manifest.NAME: hashlib.sha256(content).hexdigest()}
    for name in (*described, *also):
        try:
            files[name] = manifest.digest(folder / name)
        except OSError as error:
            raise SignatureError(f"{folder / name}: {error.strerror or error}; export the folder again") from None
        if files[name] != described.get(name, files[name]):
            raise SignatureError(
                f"{folder / name}: the file is not the one that {manifest.NAME} describes (sha256 differs); export the"
                " folder again"
            )
    signature = {
        "format": FORMAT,
        "key": _text(key.public_key()),
        "files": files,
        "signature": base64.b64encode(key.sign(_message(files))).decode(),
    }
    path = folder / NAME
    with scratch.written(path) as unfinished:
        unfinished.write_text(json.dumps(signature, indent=1, sort_keys=True) + "\n")
    return path


def check(folder: Path, keys: Iterable[str], where: str = "trusted_keys") -> Signed:
    """Check that one of these public keys (`public_keys`) made the signature of a folder.

    `where` names the setting for keys, for the message. Files are compared when `Signed.read` reads them.

    Raises
    ------
    SignatureError
        If there is no signature, it is malformed or invalid, or its key is not among these.
    """
    path = folder / NAME
    try:
        content = json.loads(trust.read(path, MOST_BYTES, owned=False))
    except FileNotFoundError:
        raise SignatureError(
            f"{folder}: is not signed (it has no {NAME}); tvm-sparse export --sign KEY signs what it writes"
        ) from None
    except trust.Refused as error:
        raise SignatureError(str(error)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise SignatureError(f"{path}: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise SignatureError(f"{path}: format is {found!r}, expected {FORMAT}; sign with this version")
    key, files, signature = (content.get(name) for name in ("key", "files", "signature"))
    if (
        not isinstance(key, str)
        or not isinstance(signature, str)
        or not isinstance(files, dict)
        or not all(isinstance(name, str) and isinstance(sha256, str) for name, sha256 in files.items())
    ):
        raise SignatureError(f"{path}: expected texts key and signature, and an object of texts, files")
    known = list(keys)
    if key not in known:
        raise SignatureError(
            f"{folder}: is signed by {key[:200]!r}, which is none of the {len(known)} trusted keys; if you trust its"
            f" owner, add it to {where}"
        )
    [public] = _parsed(key, str(path))
    invalid = _cryptography("exceptions").InvalidSignature
    try:
        public.verify(base64.b64decode(signature, validate=True), _message(files))
    except (invalid, ValueError):
        raise SignatureError(
            f"{path}: the signature does not hold: the list of files, or the signature, was changed; get the folder"
            " again"
        ) from None
    return Signed(folder, key, files)


def private_key(path: Path, passphrase: Callable[[], str]) -> Any:
    """Read an Ed25519 key from a file, OpenSSH's or PEM; `passphrase` is called if it is encrypted.

    Raises
    ------
    SignatureError
        If the file holds no such key, or it cannot be read.
    """
    serialization = _cryptography("hazmat.primitives.serialization")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SignatureError(f"{path}: {error.strerror or error}") from None
    is_openssh = b"OPENSSH" in content[:100]
    load = serialization.load_ssh_private_key if is_openssh else serialization.load_pem_private_key
    try:
        try:
            key = load(content, None)
        except TypeError:  # it is encrypted
            key = load(content, passphrase().encode())
    except Exception as error:  # of many types, including the library's own
        raise SignatureError(f"{path}: holds no private key that can be read: {error}") from None
    if not isinstance(key, _cryptography("hazmat.primitives.asymmetric.ed25519").Ed25519PrivateKey):
        raise SignatureError(f"{path}: expected an Ed25519 key (ssh-keygen -t ed25519), got {type(key).__name__}")
    return key


def public_keys(given: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Public keys, each in OpenSSH's format without a comment.

    Parameters
    ----------
    given
        A key (`ssh-ed25519 AAAA...`), the path of a file with one key per line or one in PEM, or several of these.

    Raises
    ------
    SignatureError
        If one is not an Ed25519 key, or a file cannot be read or is not trusted (`trust`), since its writer decides
        which code runs.
    TypeError
        For a value that is neither text nor path.
    """
    if isinstance(given, str | os.PathLike):
        given = [given]
    found: list[str] = []
    for one in given:
        if not isinstance(one, str | os.PathLike):
            raise TypeError(f"trusted_keys: expected keys or paths of files of keys, got {type(one).__name__}")
        if isinstance(one, str) and one.lstrip().startswith((_KIND, "-----BEGIN")):
            found += map(_text, _parsed(one, "trusted_keys"))
            continue
        try:
            content = trust.read(Path(one), MOST_BYTES).decode()
        except trust.Refused as error:
            raise SignatureError(str(error)) from None
        except (OSError, ValueError) as error:
            raise SignatureError(f"trusted_keys: {one}: {getattr(error, 'strerror', None) or error}") from None
        found += map(_text, _parsed(content, str(one)))
    return tuple(dict.fromkeys(found))


def _parsed(text: str, where: str) -> list[Any]:
    serialization = _cryptography("hazmat.primitives.serialization")
    wanted = _cryptography("hazmat.primitives.asymmetric.ed25519").Ed25519PublicKey
    pem = text.lstrip().startswith("-----BEGIN")
    lines = [text] if pem else [line for line in text.splitlines() if line.strip() and line.lstrip()[0] != "#"]
    found = []
    for line in lines:
        load = serialization.load_pem_public_key if pem else serialization.load_ssh_public_key
        try:
            key = load(line.strip().encode())
        except Exception as error:  # of many types, including the library's own
            raise SignatureError(f"{where}: holds no public key that can be read: {line[:80]!r}: {error}") from None
        if not isinstance(key, wanted):
            raise SignatureError(f"{where}: expected Ed25519 keys ({_KIND} ...), got {type(key).__name__}")
        found.append(key)
    return found


def _text(key: Any) -> str:
    serialization = _cryptography("hazmat.primitives.serialization")
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def _message(files: Mapping[str, str]) -> bytes:
    return _PURPOSE + json.dumps(dict(files), sort_keys=True, separators=(",", ":")).encode()


def _cryptography(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(f"cryptography.{module}")
    except ModuleNotFoundError:
        raise SignatureError(
            f"cryptography is missing, which signs and checks signatures: {commands.install('sign')}"
        ) from None
