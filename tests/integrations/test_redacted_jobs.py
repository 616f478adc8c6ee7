"""Whole jobs under redaction: neither spool nor ledger holds a run of token ids or their text, in any spelling."""

import hashlib
import importlib.util
import os
import struct
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

import rlk_ledger
from rlk_ledger.audit import audit
from rlk_ledger.cli import main
from rlk_ledger.history import load_history
from rlk_ledger.integrations import transformers as hf
from rlk_ledger.ledger import open_ledger
from rlk_ledger.verify import verify
from rlk_ledger_schemas.fingerprints import token_digest

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "replay" / "rlk_ledger_replay" / "model"
KEY = "correct horse battery staple"
PROMPT = [256, *b"import os\nimport "]
WINDOW = 6
"""Ids in a row that are looked for: fewer turn up by chance. Text is looked for in twice as many: it is like ours."""


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RLK_REDACTION_KEY", KEY)
    yield
    rlk_ledger.close(timeout=0)


def everything(*folders: Path) -> bytes:
    """Every byte under the folders, Parquet files as the buffers they decode to."""
    out = []
    for path in sorted(p for folder in folders for p in folder.rglob("*") if p.is_file()):
        out.append(path.read_bytes())
        if path.suffix == ".parquet":
            for column in pq.read_table(path).columns:
                for chunk in column.chunks:
                    out += [buffer.to_pybytes() for buffer in chunk.buffers() if buffer is not None]
    return b"\0".join(out)


def spellings(ids: list[int]) -> Iterable[bytes]:
    """How a run of token ids may stand in bytes."""
    n = len(ids)
    for code in ("<%di", "<%dq", "<%dH", ">%di", "<%df", "<%dd"):
        yield struct.pack(code % n, *ids)
    if max(ids) >= 128:  # below, MessagePack is text
        yield b"".join(map(msgspec.msgpack.encode, ids))
    yield ",".join(map(str, ids)).encode()
    yield ", ".join(map(str, ids)).encode()


def leaks(data: bytes, sequences: Iterable[list[int]]) -> list[str]:
    """Which runs of which sequences stand in `data`, and which of their digests."""
    found = []
    for ids in sequences:
        for at in range(len(ids) - WINDOW + 1):
            some, text = ids[at : at + WINDOW], ids[at : at + 2 * WINDOW]
            if len(set(some)) > 2:
                found += [f"{some} as {spelt!r}" for spelt in spellings(some) if spelt in data]
            if len(set(text)) > 6 and len(text) == 2 * WINDOW and max(text) < 256 and bytes(text) in data:
                found.append(repr(bytes(text)))
        digest = token_digest(ids).partition(":")[2]
        found += [digest] if digest[:16].encode() in data or bytes.fromhex(digest) in data else []
    return found


def generate(root: Path, redaction: str) -> list[list[int]]:
    """A job that samples and scores with transformers; returns every sequence of tokens it saw."""
    rlk_ledger.init(
        root / "ledger",
        run_id="r",
        role="rollout",
        roles={"rollout": 1, "training": 1},
        redaction=redaction,
        spool=root / "spool",
        shipper="off",
    )
    transformers.utils.logging.disable_progress_bar()
    model = transformers.Qwen3ForCausalLM.from_pretrained(str(MODEL), dtype=torch.float32).eval()
    policy = hf.attach(model, engine="hf-0")
    torch.manual_seed(3)
    ids = torch.tensor([PROMPT, PROMPT])
    drawn = policy.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        sample_ids=["a", "b"],
        group_ids=["g", "g"],
        do_sample=True,
        temperature=0.7,
        max_new_tokens=24,
        pad_token_id=258,
    )
    rlk_ledger.close(timeout=0)
    rows = getattr(drawn, "sequences", drawn).tolist()
    return [PROMPT, *([i for i in row[len(PROMPT) :] if i != 258] for row in rows)]


def shipped(root: Path) -> bytes:
    """Everything in the spool before it is shipped and in the ledger afterwards."""
    from rlk_ledger.service import ship_once

    before = everything(root / "spool")
    assert ship_once(root / "spool") == []
    return before + everything(root / "ledger")


@pytest.mark.parametrize(("redaction", "leaking"), [("none", True), ("hash", False), ("drop", False)])
def test_a_generating_job_leaves_no_token_behind(tmp_path: Path, redaction: str, leaking: bool) -> None:
    sequences = generate(tmp_path, redaction)
    assert all(len(ids) > WINDOW for ids in sequences)
    found = leaks(shipped(tmp_path), sequences)
    assert bool(found) == leaking, found[:5]
    assert verify(str(tmp_path / "ledger"), deep=True).exit_code in (0, 3)
    history = load_history(open_ledger(str(tmp_path / "ledger")), "r")
    assert len(history.samples) == 2
    assert not [f for f in audit(history).findings if f.severity == "error"]


@pytest.mark.parametrize("form", ["slime", "miles", "prime-rl", "nemo-rl"])
@pytest.mark.parametrize("redaction", ["hash", "drop"])
def test_an_import_leaves_no_token_and_no_digest_of_its_files_behind(
    tmp_path: Path, form: str, redaction: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ROOT / "tests" / "imports" / "data" / form
    monkeypatch.setenv("RLK_SPOOL", str(tmp_path / "spool"))
    assert main(["import", form, str(folder), "--run-id", "r", "--ledger", str(tmp_path / "open")]) in (0, 3)
    samples = load_history(open_ledger(str(tmp_path / "open")), "r").samples
    assert samples
    monkeypatch.setenv("RLK_REDACTION", redaction)
    assert main(["import", form, str(folder), "--run-id", "r", "--ledger", str(tmp_path / "ledger")]) in (0, 3)
    capsys.readouterr()
    sequences = [row.tolist() for s in samples for row in (s.prompt_token_ids, s.response_token_ids) if row is not None]
    assert leaks(everything(tmp_path / "open"), sequences)
    data = everything(tmp_path / "ledger")
    assert leaks(data, sequences) == []
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()]
    assert not [digest for digest in digests if digest.encode() in data]
    assert load_history(open_ledger(str(tmp_path / "ledger")), "r").samples[0].labels["file"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("redaction", ["hash", "drop"])
def test_a_trl_trainer_leaves_no_token_behind_and_groups_by_no_digest_of_a_prompt(
    tmp_path: Path, redaction: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("trl")
    spec = importlib.util.spec_from_file_location("trl_of_tests", Path(__file__).with_name("test_trl_trainer.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rlk_ledger.init(
        tmp_path / "ledger",
        run_id="r",
        role="training",
        redaction=redaction,
        spool=tmp_path / "spool",
        shipper="off",
    )
    trainer = module.trainer(tmp_path, max_steps=1)
    seen: list[list[int]] = []
    inner = trainer._generate_and_score_completions

    def watched(inputs: Any) -> Any:
        out = inner(inputs)
        for name in ("prompt", "completion"):
            for ids, mask in zip(out[f"{name}_ids"].tolist(), out[f"{name}_mask"].tolist()):
                seen.append([i for i, kept in zip(ids, mask) if kept])
        return out

    trainer._generate_and_score_completions = watched
    module.attach_trainer(trainer)
    trainer.train()
    rlk_ledger.close(timeout=0)
    assert len(seen) >= 8
    assert leaks(shipped(tmp_path), [ids for ids in seen if len(ids) >= WINDOW]) == []
    samples = load_history(open_ledger(str(tmp_path / "ledger")), "r").samples
    assert samples
    groups = {s.group_id for s in samples}
    assert groups == {None} if redaction == "drop" else None not in groups
