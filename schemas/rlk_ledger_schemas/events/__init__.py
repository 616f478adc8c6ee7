"""The event catalogue (schema version 1): one frozen Struct a type, registered under its wire name."""

from rlk_ledger_schemas.events.base import (
    ASSIGNED,
    COMMON,
    REGISTRY,
    SCHEMA_VERSION,
    Event,
    EventType,
    check_fields,
    convert,
    encode,
    envelope_struct,
    lookup,
    make_plain,
    plain,
    take_arrays,
)
from rlk_ledger_schemas.events.boundaries import BoundaryCaptured
from rlk_ledger_schemas.events.certificates import KernelsCertified
from rlk_ledger_schemas.events.decisions import (
    CollectiveObserved,
    ContractDeclared,
    KnobApplied,
    OperatorDecided,
    Rejected,
    SegmentTimed,
)
from rlk_ledger_schemas.events.identity import Environment, Gap, RunOpened, WriterClosed, WriterLost, WriterOpened
from rlk_ledger_schemas.events.live import BatchAdmitted, DriftDiagnosed
from rlk_ledger_schemas.events.replays import (
    ArmScored,
    CaseAttempted,
    FindingRaised,
    GateChecked,
    ReplayPlanned,
    ReportWritten,
    VerdictReached,
)
from rlk_ledger_schemas.events.retention import SegmentsPruned
from rlk_ledger_schemas.events.samples import BatchLayout, Logprobs, PromptRecorded, RolloutSample
from rlk_ledger_schemas.events.splits import SplitkvPlanned
from rlk_ledger_schemas.events.weights import WeightsLoaded, WeightsPublished

__all__ = [
    "ASSIGNED",
    "COMMON",
    "REGISTRY",
    "SCHEMA_VERSION",
    "ArmScored",
    "BatchAdmitted",
    "BatchLayout",
    "BoundaryCaptured",
    "CaseAttempted",
    "CollectiveObserved",
    "ContractDeclared",
    "DriftDiagnosed",
    "Environment",
    "Event",
    "EventType",
    "FindingRaised",
    "Gap",
    "GateChecked",
    "KernelsCertified",
    "KnobApplied",
    "Logprobs",
    "OperatorDecided",
    "PromptRecorded",
    "Rejected",
    "ReplayPlanned",
    "ReportWritten",
    "RolloutSample",
    "RunOpened",
    "SegmentTimed",
    "SegmentsPruned",
    "SplitkvPlanned",
    "VerdictReached",
    "WeightsLoaded",
    "WeightsPublished",
    "WriterClosed",
    "WriterLost",
    "WriterOpened",
    "check_fields",
    "convert",
    "encode",
    "envelope_struct",
    "lookup",
    "make_plain",
    "plain",
    "take_arrays",
]
