"""The evidence of a benchmark: packed with an index, and verified byte for byte and number for number.

    DIR/report.md, report.html, summary.csv, step_metrics.csv, paired.csv, curves/*.svg
    DIR/raw-evidence.tar.gz     plan, manifests, logs, metrics and events of every trial
    DIR/evidence-index.sha256   SHA-256 of each file in the archive
    DIR/SHA256SUMS              SHA-256 of each file above

Both lists are in the format of sha256sum(1).
"""

from __future__ import annotations

import hashlib
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from hybridasync.bench.manifest import digests, source
from hybridasync.bench.readings import EvidenceError, read_all
from hybridasync.bench.report import documents
from hybridasync.bench.results import Results, evaluate
from hybridasync.observability.jsonl import replace_atomically

ARCHIVE = "raw-evidence.tar.gz"
INDEX = "evidence-index.sha256"
SUMS = "SHA256SUMS"


def pack(raw: Path, out: Path) -> None:
    """Write archive and index of everything below `raw`. Raises OSError."""
    names = sorted(digests(raw))
    replace_atomically(out / INDEX, listing(digests(raw)).encode())
    part = out / f"{ARCHIVE}.part"
    with tarfile.open(part, "w:gz", compresslevel=6) as archive:
        for name in names:
            archive.add(raw / name, arcname=name, recursive=False, filter=_anonymous)
    part.replace(out / ARCHIVE)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without the user's name and id."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def seal(out: Path, *, without: str) -> None:
    """Write the checksum file over all files of `out` that aren't below the folder `without`: complete from then on."""
    found = {name: digest for name, digest in digests(out).items() if not name.startswith(f"{without}/")}
    found.pop(SUMS, None)
    replace_atomically(out / SUMS, listing(found).encode())


def listing(found: Mapping[str, str]) -> str:
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(found.items()))


def is_sealed(out: Path) -> bool:
    return (out / SUMS).exists()


def verify(out: Path) -> Results:
    """Check every byte, and make the tables again from the raw logs. Answers the results.

    Raises EvidenceError that names each file that isn't what it was, is missing, or is more than there was.
    """
    sums = out / SUMS
    if not sums.is_file():
        raise EvidenceError(f"{sums} is missing: {out} isn't a completed benchmark")
    here = digests(out)
    del here[SUMS]
    _same(sums, listed=_parse(sums), found=here)
    index = out / INDEX
    with tempfile.TemporaryDirectory(prefix="hybridasync-verify-") as folder:
        raw = Path(folder)
        try:
            with tarfile.open(out / ARCHIVE, "r:gz") as archive:
                _unpack(archive, raw)
        except (OSError, tarfile.TarError, EOFError) as error:
            raise EvidenceError(f"{ARCHIVE} can't be read: {error}") from error
        _same(index, listed=_parse(index), found=digests(raw), inside=f"{ARCHIVE}:")
        results = evaluate(read_all(raw))
    for name, text in documents(results).items():
        if not (out / name).is_file() or (out / name).read_bytes() != text.encode():
            raise EvidenceError(f"{name} isn't what the raw logs in {ARCHIVE} give{_other_program(results)}")
    return results


def _unpack(archive: tarfile.TarFile, into: Path) -> None:
    """Files alone, and none that would lie elsewhere. (`extractall` refuses those from Python 3.11.4 on only.)"""
    for member in archive.getmembers():
        target, content = (into / member.name).resolve(), archive.extractfile(member) if member.isfile() else None
        if content is None or not target.is_relative_to(into.resolve()):
            raise tarfile.TarError(f"{member.name!r} isn't a file below the archive's root")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.read())


def _other_program(results: Results) -> str:
    made_with = {str(one.manifest["source"]["sha256"]) for one in results.readings.trials if one.manifest}
    here = source()
    return (
        "" if made_with == {here["sha256"]} else f" (to this program, which isn't the one that ran: {here['version']})"
    )


def _parse(path: Path) -> dict[str, str]:
    """Strict: a list that isn't exactly as `listing` writes it was changed."""
    try:
        content = path.read_bytes()
        found = {name: digest for digest, _, name in (line.partition("  ") for line in content.decode().splitlines())}
    except (OSError, UnicodeDecodeError) as error:
        raise EvidenceError(f"{path.name} can't be read: {error}") from error
    lengths = {len(digest) for digest in found.values()}
    if listing(found).encode() != content or lengths - {hashlib.sha256().digest_size * 2}:
        raise EvidenceError(f"{path.name} isn't a list of checksums as it was written")
    return found


def _same(path: Path, *, listed: Mapping[str, str], found: Mapping[str, str], inside: str = "") -> None:
    wrong = [
        *_complaints("is missing", listed.keys() - found.keys(), inside),
        *_complaints(f"isn't in {path.name}", found.keys() - listed.keys(), inside),
        *_complaints(
            f"differs from its line in {path.name}",
            (n for n in listed.keys() & found.keys() if listed[n] != found[n]),
            inside,
        ),
    ]
    if wrong:
        raise EvidenceError("; ".join(wrong))


def _complaints(what: str, names: Iterable[str], inside: str) -> list[str]:
    return [f"{inside}{name} {what}" for name in sorted(names)]
