"""First divergence on made captures: which module is which part, shards, replicas, floors and what stays unknown."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlk_ledger.boundaries import Pass, Tensor, read_passes
from rlk_ledger.build import build, event
from rlk_ledger.call_chain import CORRESPONDENCES, Correspondence, Part, corresponding, cut
from rlk_ledger.cli import main
from rlk_ledger.divergence import Divergence, compare_passes, placebos
from rlk_ledger.history import History

HEADS, GROUPS, DIM, WIDTH = 4, 2, 8, 16
ROOT = Path(__file__).parents[2]


def values(seed: int, rows: int, columns: int) -> Any:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


class Told:
    """What writers recorded: `at` adds one captured tensor, `passes` gives what the reader makes of it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, dict[str, Any]]] = []

    def writer(self, name: str, role: str, rank: int = 0, size: int = 1, engine: str = "transformers") -> None:
        parallel = {"tp": {"rank": rank, "size": size}} if size > 1 else None
        told = {"role": role, "rank": rank, "world_size": size, "engine": {"name": engine}, "parallel": parallel}
        self.events.append((name, "writer.opened", {k: v for k, v in told.items() if v is not None}))

    def layout(self, name: str, layout_id: str, sizes: dict[str, int], **fields: Any) -> None:
        told = {"sample_order": tuple(sizes), "sequence_lengths": list(sizes.values()), **fields}
        self.events.append((name, "batch.layout", {"layout_id": layout_id, **told}))

    def at(self, name: str, boundary: str, array: Any, **fields: Any) -> None:
        digest = f"sum64x2:{abs(hash(array.tobytes())):032x}"
        layer = re.search(r"layers\.(\d+)", boundary)
        told = {"digest": digest, "order": len(self.events), "dtype": "float32", "shape": list(array.shape)}
        told |= {"layer": int(layer[1])} if layer else {}
        told |= {"values": array.reshape(-1).tolist(), "stage": "output", **fields}
        self.events.append((name, "boundary.captured", {"boundary": boundary, **told}))

    def records(self) -> list[Any]:
        numbers: dict[str, int] = {}
        out = []
        for writer, kind, fields in self.events:
            seq = numbers[writer] = numbers.get(writer, -1) + 1
            out.append(event("r1", writer, seq, kind, **fields))
        return out

    def passes(self, tmp_path: Path) -> list[Pass]:
        ledger = build(str(tmp_path / "ledger"), "r1", self.records())
        return read_passes(History.from_events(ledger.read_events("r1")))

    def compared(self, tmp_path: Path, **options: Any) -> Divergence:
        passes = self.passes(tmp_path)
        return compare_passes(*passes[:2], **options)


@pytest.fixture
def told() -> Told:
    made = Told()
    made.writer("left", "rollout")
    made.writer("right", "training")
    return made


def states(found: Divergence) -> dict[str, str]:
    return {c.part.text: c.status for c in found.compared}


def test_names_are_places_in_the_chain() -> None:
    wanted = {
        ("model.embed_tokens", "output"): "embedding",
        ("module.model.layers.3.self_attn.q_proj", "output"): "layers.3.q",
        ("model.layers.3.self_attn.o_proj", "input"): "layers.3.attention",
        ("model.layers.0.post_attention_layernorm", "input"): "layers.0.attention_residual",
        ("model.layers.0.post_attention_layernorm", "output"): "layers.0.mlp_norm",
        ("model.layers.11.mlp.down_proj", "input"): "layers.11.swiglu",
        ("model.layers.11", "output"): "layers.11.mlp_residual",
        ("model.norm", "output"): "final_norm",
        ("lm_head", "output"): "logits",
        ("layers.2.q_rope", "output"): "layers.2.q_rope",
        ("decoder.layers.1.self_attention.linear_qkv", "output"): "layers.1.q",
    }
    for (boundary, stage), part in wanted.items():
        tensor = Tensor(boundary, stage, 0, None, "float32", (1,), None)
        rule = corresponding(tensor, "transformers", CORRESPONDENCES)
        assert rule is not None
        found = rule.matches(tensor, "transformers")
        assert found is not None
        assert found.text == part
    for name in ("model.layers.0.mlp.experts", "layers.0.self_attn.rotary_emb", "visual.patch"):
        assert corresponding(Tensor(name, "output", 0, 0, None, (), None), None, CORRESPONDENCES) is None


def test_every_proof_names_a_test_that_exists() -> None:
    for rule in CORRESPONDENCES:
        if rule.proof is not None:
            path, _, name = rule.proof.partition("::")
            assert f"def {name}(" in (ROOT / path).read_text(), rule.name


@pytest.mark.parametrize("ranks", [1, 2])
def test_fused_projections_are_the_three_they_were_made_of(ranks: int) -> None:
    q, k, v = (values(i, 5, n * DIM) for i, n in enumerate((HEADS, GROUPS, GROUPS)))
    gate, up = values(7, 5, WIDTH), values(8, 5, WIDTH)
    by_name = {rule.name: rule for rule in CORRESPONDENCES}
    for name, pieces in (("fused_qkv.sections", (q, k, v)), ("fused_gate_up.halves", (gate, up))):
        shares = [np.split(piece, ranks, axis=1) for piece in pieces]
        parts = [np.concatenate([share[rank] for share in shares], axis=1) for rank in range(ranks)]
        tensor = Tensor("model.layers.0.x", "output", 0, 0, "float32", (1, 5), None, parts)
        found = cut(tensor, by_name[name], [piece.shape[1] for piece in pieces])
        assert not isinstance(found, str)
        assert all(np.array_equal(a, b) for a, b in zip(found, pieces, strict=True))


@pytest.mark.parametrize("ranks", [1, 2])
def test_grouped_qkv_of_sequence_first_tensors_is_the_three_projections(ranks: int) -> None:
    samples, positions = 3, 4
    q, k, v = (values(i, samples * positions, n * DIM) for i, n in enumerate((HEADS, GROUPS, GROUPS)))
    share = HEADS // GROUPS
    heads = [piece.reshape(len(piece), -1, DIM) for piece in (q, k, v)]
    groups = []
    for g in range(GROUPS):
        queries, key, value = heads[0][:, g * share : (g + 1) * share], heads[1][:, g : g + 1], heads[2][:, g : g + 1]
        groups.append(np.concatenate([queries, key, value], axis=1))
    fused = np.concatenate(groups, axis=1).reshape(samples, positions, -1).swapaxes(0, 1)
    parts = [np.ascontiguousarray(p).reshape(samples * positions, -1) for p in np.split(fused, ranks, axis=2)]
    rule = next(r for r in CORRESPONDENCES if r.name == "megatron.fused_qkv.groups")
    tensor = Tensor("layers.0.self_attention.linear_qkv", "output", 0, 0, "float32", (positions, samples), None, parts)
    widths = [HEADS * DIM, GROUPS * DIM, GROUPS * DIM]
    found = cut(tensor, rule, widths, DIM)
    assert not isinstance(found, str)
    assert all(np.array_equal(a, b) for a, b in zip(found, (q, k, v), strict=True))
    assert "--head-dim" in cut(tensor, rule, widths, None)


def test_a_fused_projection_is_filtered_by_its_proof_and_its_own_difference_is_named(
    told: Told, tmp_path: Path
) -> None:
    q, k, v = (values(i, 6, n * DIM) for i, n in enumerate((HEADS, GROUPS, GROUPS)))
    for name, piece in (("q", q), ("k", k), ("v", v)):
        told.at("left", f"model.layers.0.self_attn.{name}_proj", piece)
    changed = k.copy()
    changed[3, 2] += 1
    told.at("right", "model.layers.0.self_attn.qkv_proj", np.concatenate([q, changed, v], axis=1))
    found = told.compared(tmp_path)
    assert states(found) == {"layers.0.q": "equal", "layers.0.k": "differs", "layers.0.v": "equal"}
    assert found.compared[0].filtered == ("name:layers.#.self_attn.q_proj", "fused_qkv.sections")
    assert found.first is not None
    assert (found.first.differing, found.first.peak) == (1, pytest.approx(1.0))


def test_a_fused_tensor_that_cannot_be_cut_and_an_unproven_correspondence_are_unknown(
    told: Told, tmp_path: Path
) -> None:
    x = values(0, 4, WIDTH)
    told.at("left", "model.layers.0.self_attn.q_proj", x)
    told.at("right", "model.layers.0.self_attn.qkv_proj", x)
    told.at("left", "lm_head", x)
    told.at("right", "head", x)
    rules = (*CORRESPONDENCES, Correspondence("claimed", "head", "output", ("logits",)))
    found = told.compared(tmp_path, rules=rules)
    reasons = {c.part.text: c.reason for c in found.compared}
    assert set(states(found).values()) == {"unknown"}
    assert found.exit_code == 3
    assert reasons["layers.0.q"].startswith("fused")
    assert reasons["logits"] == "correspondence claimed is not proven"


def test_what_no_correspondence_names_keeps_the_answer_from_being_clean(told: Told, tmp_path: Path) -> None:
    for side in ("left", "right"):
        told.at(side, "lm_head", values(0, 2, 3))
        told.at(side, "model.layers.0.mlp.experts", values(1, 2, 3))
    found = told.compared(tmp_path)
    assert (found.exit_code, found.unmapped) == (3, ["model.layers.0.mlp.experts (output)"])


@pytest.mark.parametrize("cut_by", ["columns", "rows", "vocab"])
def test_shards_are_one_tensor_and_a_missing_rank_is_unknown(cut_by: str, tmp_path: Path) -> None:
    whole = values(0, 6, 8)
    for missing in (False, True):
        told = Told()
        told.writer("left", "rollout")
        told.at("left", "lm_head", whole)
        for rank in range(1 if missing else 2):
            told.writer(f"right{rank}", "training", rank, 2)
            span = (4 * rank, 4 * rank + 4)
            fields: dict[str, Any] = {"feature_range": span}
            part = whole[:, span[0] : span[1]]
            if cut_by == "rows":  # zigzag: one early and one late piece
                ranges = ((0, 1), (5, 6)) if rank == 0 else ((1, 3), (3, 5))
                part = np.concatenate([whole[a:b] for a, b in ranges])
                fields = {"shard": {"axis": "sequence", "rank": rank, "world_size": 2, "ranges": ranges}}
            elif cut_by == "vocab":
                fields = {"shard": {"axis": "vocab", "rank": rank, "world_size": 2, "ranges": (span,)}}
            told.at(f"right{rank}", "lm_head", part, **fields)
        found = told.compared(tmp_path / str(missing))
        assert states(found) == {"logits": "unknown" if missing else "equal"}
        if missing:
            assert found.compared[0].reason == "shards of ranks [1] are missing"


def test_replicas_that_hold_other_bits_are_named_where_they_first_differ(told: Told, tmp_path: Path) -> None:
    x = values(0, 4, 8)
    told.writer("right1", "training", 1, 2)
    for boundary in ("model.layers.0", "model.layers.1"):
        told.at("left", boundary, x)
        told.at("right", boundary, x)
        told.at("right1", boundary, x if boundary.endswith("0") else np.nextafter(x, 9))
    found = told.compared(tmp_path)
    assert [(r.boundary, r.writers) for r in found.replicas] == [("model.layers.1", ("right", "right1"))]
    assert found.exit_code == 1


def test_rows_are_matched_by_sample_and_position_whatever_the_layout(tmp_path: Path) -> None:
    sizes = {"a": 3, "b": 5}
    data = {name: values(i, size, 4) for i, (name, size) in enumerate(sizes.items())}
    layouts: dict[str, tuple[dict[str, int], dict[str, Any], Any]] = {}
    packed = np.concatenate([data["b"], data["a"]])
    layouts["packed"] = ({"b": 5, "a": 3}, {"packing": True}, packed)
    for side in ("left", "right"):
        grid = np.full((2, 6, 4), 99.0, np.float32)
        for i, name in enumerate(sizes):
            at = slice(6 - sizes[name], 6) if side == "left" else slice(0, sizes[name])
            grid[i, at] = data[name]
        layouts[side] = (sizes, {"padding_side": side, "packing": False}, grid)
    for one in layouts:
        told = Told()
        for role, name in (("rollout", "packed"), ("training", one)):
            told.writer(role, role)
            order, fields, tensor = layouts[name]
            told.layout(role, f"{role}-l", order, **fields)
            told.at(role, "model.norm", tensor, layout_id=f"{role}-l")
        assert states(told.compared(tmp_path / one)) == {"final_norm": "equal"}


def test_a_difference_counts_beyond_twice_its_floor_and_a_placebo_is_found_by_itself(tmp_path: Path) -> None:
    x, noise = values(0, 8, 64), values(1, 8, 64)
    for size, status in ((1.5, "within_floor"), (2.5, "differs")):
        told = Told()
        for role, shift in (("rollout", 0.0), ("training", size)):
            told.writer(role, role)
            for number, more in ((0, 0.0), (1, 1.0)):
                layout = f"{role}-{number}"
                told.layout(role, layout, {"a": 8}, packing=True)
                moved = (x + 1e-2 * (shift + more) * noise).astype(np.float32)
                told.at(role, "model.norm", moved, layout_id=layout, pass_id=f"pass/{number}")
        passes = told.passes(tmp_path / str(size))
        left, right = passes[0], passes[2]
        found = compare_passes(left, right, [p for s in (left, right) for p in placebos(passes, s)])
        assert states(found) == {"final_norm": status}
        assert found.compared[0].floor == pytest.approx(
            1e-2 * np.sqrt(np.mean(noise.astype(np.float64) ** 2)), rel=1e-3
        )


def test_nan_on_one_side_is_a_difference_and_equal_nan_bits_are_none(told: Told, tmp_path: Path) -> None:
    x = values(0, 2, 4)
    bad = x.copy()
    bad[0, 0] = np.nan
    told.at("left", "model.layers.0", bad)
    told.at("right", "model.layers.0", bad)
    told.at("left", "model.norm", bad)
    told.at("right", "model.norm", x)
    found = told.compared(tmp_path)
    assert states(found) == {"layers.0.mlp_residual": "equal", "final_norm": "differs"}
    assert found.first is not None
    assert (found.first.rms, found.anchor) == (float("inf"), Part(0, "mlp_residual"))


def test_the_command_says_what_to_name_when_it_cannot_tell(told: Told, tmp_path: Path, capsys: Any) -> None:
    url = str(tmp_path / "ledger")
    told.at("left", "model.norm", values(0, 2, 2), pass_id="a/0")
    told.at("left", "model.norm", values(0, 2, 2), pass_id="b/0")
    told.at("right", "model.norm", values(0, 2, 2), pass_id="c/0")
    build(url, "r1", told.records())
    assert main(["divergence", "r1", "--ledger", url]) == 2
    assert "rollout:a/0, rollout:b/0, training:c/0" in capsys.readouterr().err
    assert main(["divergence", "r1", "--ledger", url, "--left", "rollout:b/0", "--right", "training", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["passes"][0]["boundaries"][0]["status"] == "equal"
    assert main(["divergence", "r1", "--ledger", url, "--left", "rollout:nope"]) == 2
