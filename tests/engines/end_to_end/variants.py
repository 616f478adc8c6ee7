"""What the two engines of the end-to-end do, and what each variant changes."""

import json
from pathlib import Path

import msgspec
from safetensors.torch import load_file, save_file

TEMPERATURE = 0.7
STEPS, GROUPS, GROUP_SIZE = 3, 8, 2
MICRO_BATCH = 8
LEARNING_RATE = 2e-3
WAIT_S = 240.0


class Variant(msgspec.Struct, frozen=True):
    """One run: how it differs from the clean one.

    logprobs_mode: vLLM's. training_dtype: what Megatron computes in. float32_head: the trainer's head alone in float32.
    stale: vLLM reloads the first weights under every version. lost_rank: what this training rank recorded never leaves
    its node. tied: the model's head is its embedding, as shipped; else it is a tensor of its own that begins as a copy.
    """

    name: str
    logprobs_mode: str = "processed_logprobs"
    training_dtype: str = "bfloat16"
    float32_head: bool = False
    stale: bool = False
    lost_rank: int | None = None
    tied: bool = False


VARIANTS = (
    Variant("clean"),
    Variant("training-float32", training_dtype="float32"),
    Variant("stale-reload", stale=True),
    Variant("bf16-head", float32_head=True),
    Variant("missing-tensor-rank", lost_rank=1),
    Variant("raw-against-processed", logprobs_mode="raw_logprobs"),
    Variant("tied-head", tied=True),
)
"""In the order in which they run: each of the last two needs a vLLM engine of its own."""


class Job(msgspec.Struct, frozen=True):
    """Where a run of all variants keeps what it makes.

    `shipped` is the folder of the shipped model, `ledger` the URL of the one ledger that all runs are in.
    """

    root: str
    shipped: str
    ledger: str

    def model(self, variant: Variant) -> Path:
        """The folder of a variant's first weights."""
        return Path(self.shipped) if variant.tied else Path(self.root) / "untied"

    def untie(self) -> None:
        """Writes the shipped model with its head as a tensor of its own."""
        folder = Path(self.root) / "untied"
        folder.mkdir(parents=True)
        config = json.loads((Path(self.shipped) / "config.json").read_text()) | {"tie_word_embeddings": False}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = load_file(Path(self.shipped) / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    @property
    def spool(self) -> Path:
        """The recorders' spool."""
        return Path(self.root) / "spool"

    @property
    def lost_node(self) -> Path:
        """The spool of a node that nothing is shipped from."""
        return Path(self.root) / "lost-node"

    def work(self, variant: Variant) -> Path:
        """Where the engines of one variant hand over samples."""
        return Path(self.root) / "work" / variant.name

    def weights(self, variant: Variant, version: int) -> Path:
        """The checkpoint of one version: an absolute path, as a ledger in a bucket has no folder beside it."""
        return Path(self.root) / "weights" / variant.name / version_name(version)


def version_name(version: int) -> str:
    """The name of a weight version."""
    return f"v{version}"


def read_job(path: str) -> Job:
    """The job in a JSON file."""
    return msgspec.json.decode(Path(path).read_bytes(), type=Job)
