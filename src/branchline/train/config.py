"""Settings of training: losses, updates, runs. Most are options of `branchline train`; none needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from branchline.core.choices import GroupStd, LayoutOption, Normaliser, TrackerName
from branchline.core.errors import InputError
from branchline.core.option_checks import check_number
from branchline.core.option_fields import not_an_option, option
from branchline.engines.hf_config import HfConfig

if TYPE_CHECKING:
    from branchline.export.credit import CreditPolicy
    from branchline.export.samples import ExportPolicy

LossName = Literal["ppo", "reinforce", "cispo", "gspo"]
KlEstimator = Literal["k3", "k3_ratio"]
"""How the divergence of the policy from the reference is estimated from a sampled token. `k3`: r − log r − 1,
with r the reference's probability over the policy's. `k3_ratio`: k3 times the policy's ratio to the one at
the start of the step, whose gradient is that of the divergence; TRL's default."""
Schedule = Literal["constant", "linear"]


@dataclass(frozen=True)
class LossConfig:
    """How the loss of a step is computed. The defaults are GRPO's."""

    name: LossName = "ppo"
    """The loss of a token. `ppo` is that of GRPO, DAPO and Dr. GRPO, which differ in advantages and
    normalisers only."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    reference_kl_coefficient: float = 0.0
    """Weight of the KL divergence of the policy from a reference policy, the initial model."""
    reference_kl_estimator: KlEstimator = "k3_ratio"
    entropy_coefficient: float = 0.0
    """Weight of an entropy bonus."""
    max_importance_weight: float | None = None
    """Limit of the weights that correct for an engine whose logprobs differ from the trainer's; None: no
    correction."""

    def __post_init__(self) -> None:
        if self.name not in get_args(LossName):
            raise InputError(f"loss: got {self.name!r}, expected one of {', '.join(get_args(LossName))}")
        if self.reference_kl_estimator not in get_args(KlEstimator):
            raise InputError(
                f"reference_kl_estimator: got {self.reference_kl_estimator!r}, "
                f"expected one of {', '.join(get_args(KlEstimator))}"
            )
        for name in ("clip_low", "clip_high", "reference_kl_coefficient", "entropy_coefficient"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name}: got {getattr(self, name):g}, expected 0 or more")
        if self.max_importance_weight is not None and not self.max_importance_weight > 0:
            raise InputError(
                f"max_importance_weight: got {self.max_importance_weight:g}, expected more than 0"
            )


@dataclass(frozen=True)
class UpdateConfig:
    """How a batch of rows changes the weights."""

    learning_rate: float = 1e-5
    """The step size of the optimizer."""
    schedule: Schedule = "constant"
    """`linear`: the learning rate falls to 0 over the steps of the run."""
    passes: int = 1
    """Optimizer steps on each batch of rows."""
    max_grad_norm: float = 1.0
    """Longer gradients are scaled down to this norm."""
    weight_decay: float = 0.0
    """How much each step shrinks the weights."""
    max_batch_tokens: int | None = 4096
    """Tokens of one forward pass; gradients of all passes are added up before the optimizer step. A longer
    row has a pass of its own; None: all rows are one pass."""
    layout: LayoutOption = "auto"
    """`rows`: each row has a forward pass of its own. `auto`: so if the model cannot follow packed trees,
    which is tested with random ids at the start. `tree`: such a model is refused."""
    temperature: float = 1.0
    """The temperature that tokens are sampled with."""
    loss: LossConfig = not_an_option(factory=lambda: LossConfig(max_importance_weight=2.0))

    def __post_init__(self) -> None:
        for name, least in (("learning_rate", 0.0), ("weight_decay", 0.0)):
            if not getattr(self, name) >= least:
                raise InputError(f"{name}: got {getattr(self, name):g}, expected {least:g} or more")
        if self.layout not in get_args(LayoutOption):
            raise InputError(
                f"layout: got {self.layout!r}, expected one of {', '.join(get_args(LayoutOption))}"
            )
        if self.schedule not in get_args(Schedule):
            raise InputError(f"schedule: got {self.schedule!r}, expected {' or '.join(get_args(Schedule))}")
        for name in ("passes", "max_batch_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError(f"{name}: got {value}, expected 1 or more")
        for name in ("max_grad_norm", "temperature"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name}: got {getattr(self, name):g}, expected more than 0")


def _default_credit() -> CreditPolicy:
    from branchline.export.credit import CreditPolicy

    return CreditPolicy()


@dataclass(frozen=True)
class TrainerConfig:
    """How a run samples, learns and records."""

    steps: int = option(100, basic=True)
    """Training steps."""
    groups_per_step: int = option(4, name="tasks_per_step", basic=True)
    """Tasks drawn for each step."""
    group_size: int = option(8, name="n", basic=True)
    """Sessions of one task, compared with each other."""
    max_staleness: int = 0
    """How many versions the policy may have moved between the start of an episode and its update."""
    update: UpdateConfig = not_an_option(factory=UpdateConfig)
    normaliser: Normaliser = not_an_option("trajectory")
    constant_length: int | None = not_an_option(None)
    """Of the normaliser `constant`: the loss is divided by this times the number of episodes. TRL's
    `max_completion_length`, the most tokens that an episode may have."""
    credit: CreditPolicy = not_an_option(factory=_default_credit)
    group_std: GroupStd = not_an_option("sample")
    """What advantages are divided by: the standard deviation of their group, or nothing."""
    export_policy: ExportPolicy | None = not_an_option(None)
    """Which outputs are trained, and how shared tokens count; None: the sessions' own policy."""
    sampling: dict[str, Any] = option(factory=dict)
    """Further sampling parameters of all sessions, which override those of the agent: '{"max_tokens": 200}'.
    One that shapes the distribution, such as top_p, is sampled with, and not corrected for in training."""
    engine: HfConfig = not_an_option(factory=lambda: HfConfig(logprob_kind="processed"))
    episode_timeout_s: float | None = option(None, name="timeout_s", metavar="S", basic=True)
    """Time limit of an agent; by default none."""
    reward_timeout_s: float | None = option(600.0, metavar="S")
    """Time limit of a reward function or verifier, for each session."""
    checkpoint_every: int | None = 10
    """Steps between checkpoints; the last step has one, too. None (null in a file): no step has one."""
    keep_checkpoints: int = 2
    """How many checkpoints are kept."""
    eval_every: int = option(10, needs={"eval": ()})
    """Steps between evaluations; the model as it begins and that of the last step are evaluated, too."""
    seed: int = option(0, basic=True)
    """Seed of tasks and sampling."""
    deterministic: bool = False
    """Sample each reply alone, so that runs with one seed are equal bit for bit on one CPU; several times
    slower. Else they differ by rounding: the engine computes together what happens to arrive together."""
    report_to: tuple[TrackerName, ...] = ()
    """Trackers that get the metrics, too."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("groups_per_step", 1), ("group_size", 2), ("max_staleness", 0),
                            ("checkpoint_every", 1), ("keep_checkpoints", 1),
                            ("constant_length", 1), ("eval_every", 1)):  # fmt: skip
            if (value := getattr(self, name)) is not None and value < least:
                raise InputError(f"{name}: got {value}, expected {least} or more")
        for name in ("episode_timeout_s", "reward_timeout_s"):
            if (seconds := getattr(self, name)) is not None:
                check_number(name, seconds, above=0)
        for name, names in (("normaliser", get_args(Normaliser)), ("group_std", get_args(GroupStd))):
            if (choice := getattr(self, name)) not in names:
                raise InputError(f"{name}: got {choice!r}, expected one of {', '.join(names)}")
        if (self.normaliser == "constant") != (self.constant_length is not None):
            raise InputError(
                f"constant_length: got {self.constant_length} for the normaliser {self.normaliser!r}, "
                "expected a number of tokens for `constant` and None for the others"
            )
        if self.deterministic and self.max_staleness:
            raise InputError(
                f"max_staleness: got {self.max_staleness}, expected 0 for a deterministic run: which weights "
                "sample a token would depend on the time"
            )
        if "temperature" in self.sampling:
            raise InputError("sampling.temperature: expected it in update.temperature, which trains it too")
