"""Every algorithm and every loss, declared once as a record. Flags, --help, rules, trainer and docs derive from these.

Nothing here imports torch: a function stands as the dotted path that it is loaded from where it runs. Records of your
own are named by their dotted path, `--advantage-estimator my_module.MY_ALGORITHM`: see docs/extending.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slime_retool.errors import ConfigError
from slime_retool.protocols import load_function, load_object

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")
"""Kinds of `kl.kl_estimate`."""
TIS_LEVELS = ("token", "sequence", "geometric")
TIS_MODES = ("truncate", "mask")
"""Both of `importance.importance_weights`."""

Function = str | Callable[..., Any]
"""A function, or the dotted path that it is loaded from when it is first needed."""


def loaded(function: Function) -> Callable[..., Any]:
    """The function itself. Raises ConfigError for a path that leads to none."""
    return load_function(function) if isinstance(function, str) else function


@dataclass(frozen=True, kw_only=True)
class LossTerm:
    """One summand of a model's loss, with what it reads and what it reports."""

    name: str
    function: Function
    """`losses.LossInputs` (of a value model: `losses.ValueInputs`) -> (weighted sum, metrics)."""
    parts: tuple[str, ...] = ()
    """Metrics that are parts of the loss: weighted sums, reported as they are."""
    means: tuple[str, ...] = ()
    """Metrics that are means over tokens: weighted sums, divided by the sum of all weights."""
    needs: tuple[str, ...] = ()
    """Per-token columns that it reads beyond weights, `old_log_probs` and `advantages`: `ref_log_probs`, or columns of
    the samples themselves (`types.TrainSample.columns`)."""
    provider: str | None = None
    """Dotted path of what fills in those columns of the samples: `async (context, samples) -> None`, after a rollout
    (`rollout.context.RolloutContext`, list of `types.TrainSample`)."""
    switch: str | None = None
    """The option that turns it on; None: it is always on."""
    coefficient: str | None = None
    """The option that holds its weight in the loss; None: 1."""
    sign: float = 1.0

    @property
    def flag(self) -> str:
        """What a user calls it."""
        return f"the loss {self.name}" if self.switch is None else f"--{self.switch.replace('_', '-')}"

    def weight(self, options: Any) -> float:
        """What its value is multiplied with in the sum."""
        return 1.0 if self.coefficient is None else self.sign * getattr(options, self.coefficient)


@dataclass(frozen=True, kw_only=True)
class Loss(LossTerm):
    """The loss that a run is about (`--loss-type`); terms are added to it."""

    parts: tuple[str, ...] = ("pg_loss",)
    means: tuple[str, ...] = ("clip_fraction", "ppo_kl")
    supervised: bool = False
    """Learns from conversations as they are: no engines, no advantages, no terms beside it."""
    independent_clips: bool = False
    """The bounds of the ratio have nothing to do with each other, and --eps-clip 1 means no lower one."""
    forbids: tuple[str, ...] = ()
    """Options that it does not have."""
    published: Mapping[str, float] = field(default_factory=dict)
    """Values of options in its paper, where the defaults are none for it."""


PPO_LOSS = Loss(name="ppo", function="slime_retool.algo.losses.ppo_loss")


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """What `--advantage-estimator` names: how rewards become advantages, and which loss they go into."""

    name: str
    summary: str = ""
    """One clause, for --help."""
    formula: str = ""
    """The advantage of token t, for docs/algorithms.md."""
    source: str = ""
    """Address of its paper."""
    advantage: Function
    """`advantages.AdvantageInputs` -> advantages of the learned tokens [M]."""
    loss: Loss = PPO_LOSS
    needs_group: bool = True
    """It compares the samples of one prompt: there must be several."""
    needs_critic: bool = False
    """It reads values, and a critic is trained on its returns (advantage + value)."""
    always_whitens: bool = False
    """Its advantages are standardised over the rollout, whatever --normalize-advantages says."""
    reads: tuple[str, ...] = ()
    """Options that change its advantages, of those that not every algorithm has."""


GSPO_LOSS = Loss(
    name="gspo",
    function="slime_retool.algo.losses.gspo_loss",
    published={"eps_clip": 3e-4, "eps_clip_high": 4e-4},
)
CISPO_LOSS = Loss(
    name="cispo",
    function="slime_retool.algo.losses.cispo_loss",
    independent_clips=True,
    forbids=("eps_clip_c",),
)
SFT_LOSS = Loss(name="sft_loss", function="slime_retool.algo.losses.sft_loss", parts=(), means=(), supervised=True)
VALUE_LOSS = LossTerm(
    name="value_loss",
    function="slime_retool.algo.losses.value_loss",
    parts=("value_loss",),
    means=("value_clip_fraction",),
    needs=("old_values", "returns"),
)

ADDED_TERMS = (
    LossTerm(
        name="kl_loss",
        function="slime_retool.algo.losses.kl_loss",
        parts=("kl_loss",),
        needs=("ref_log_probs",),
        switch="use_kl_loss",
        coefficient="kl_loss_coef",
    ),
    LossTerm(
        name="distillation",
        function="slime_retool.algo.losses.distillation_loss",
        parts=("distill_loss",),
        means=("reverse_kl",),
        needs=("teacher_log_probs",),
        provider="slime_retool.rollout.teacher.add_teacher_log_probs",
        switch="distill_coef",
        coefficient="distill_coef",
    ),
    LossTerm(
        name="entropy",
        function="slime_retool.algo.losses.entropy_bonus",
        means=("entropy",),
        coefficient="entropy_coef",
        sign=-1.0,
    ),
)
"""What is added to the loss of a policy, in this order."""

_GRPO = Algorithm(
    name="grpo",
    summary="rewards standardised within each group",
    formula="(r_i - mean) / (std + 1e-6) of the group",
    source="https://arxiv.org/abs/2402.03300",
    advantage="slime_retool.algo.advantages.grpo",
    reads=("disable_grpo_std_normalization",),
)
_REINFORCE = Algorithm(
    name="reinforce_plus_plus",
    summary="discounted returns, whitened",
    formula="whitened sum_{u >= t} gamma^(u - t) R_u",
    source="https://arxiv.org/abs/2501.03262",
    advantage="slime_retool.algo.advantages.reinforce_plus_plus",
    needs_group=False,
    always_whitens=True,
    reads=("gamma",),
)
ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        _GRPO,
        replace(
            _GRPO,
            name="gspo",
            summary="grpo's with one ratio for a whole sample",
            source="https://arxiv.org/abs/2507.18071",
            loss=GSPO_LOSS,
        ),
        replace(
            _GRPO,
            name="cispo",
            summary="grpo's with clipped weights in place of a clipped objective",
            source="https://arxiv.org/abs/2506.13585",
            loss=CISPO_LOSS,
        ),
        Algorithm(
            name="rloo",
            summary="rewards less the mean of the group's others",
            formula="r_i - mean of the group's other n - 1 rewards",
            source="https://arxiv.org/abs/2402.14740",
            advantage="slime_retool.algo.advantages.rloo",
        ),
        _REINFORCE,
        replace(
            _REINFORCE,
            name="reinforce_plus_plus_baseline",
            summary="the same from rewards less their group's mean",
            formula="as `reinforce_plus_plus`, with r_i - group mean for r_i",
            advantage="slime_retool.algo.advantages.reinforce_plus_plus_baseline",
            needs_group=True,
        ),
        Algorithm(
            name="ppo",
            summary="generalised advantage estimation with a critic",
            formula="GAE(gamma, lambda) of R_u with a critic",
            source="https://arxiv.org/abs/1707.06347",
            advantage="slime_retool.algo.advantages.ppo",
            needs_group=False,
            needs_critic=True,
            reads=("gamma", "lambd"),
        ),
    )
}
"""By name. The default is the first."""

LOSSES: dict[str, Loss | None] = {"policy_loss": None, SFT_LOSS.name: SFT_LOSS}
"""By `--loss-type`; None is the loss of the algorithm."""


def find_algorithm(name: str) -> Algorithm:
    """The algorithm of that name, or the one at a dotted path: a record, or a plain function of its advantages.

    A plain function gets PPO's loss and groups of samples. ConfigError for anything else.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    kind = "an Algorithm or a function of AdvantageInputs"
    found = _at_path(name, "--advantage-estimator", ALGORITHMS, kind, Algorithm)
    return found if isinstance(found, Algorithm) else Algorithm(name=name, advantage=found)


def find_loss(name: str, algorithm: Algorithm) -> Loss:
    """What `--loss-type` names: the algorithm's own, a supervised one, or one at a dotted path.

    At a path is a record, or a plain function of `losses.LossInputs`, which may report what PPO's loss does.
    ConfigError for anything else.
    """
    if name in LOSSES:
        return LOSSES[name] or algorithm.loss
    found = _at_path(name, "--loss-type", LOSSES, "a Loss or a function of LossInputs", Loss)
    return found if isinstance(found, Loss) else Loss(name=name, function=found)


def _at_path(path: str, flag: str, known: Iterable[str], kind: str, record: type) -> Any:
    if "." not in path:
        raise ConfigError(f"unknown {flag} {path!r}: it is one of {', '.join(known)}, or the dotted path of {kind}")
    found = load_object(path, flag)
    if not isinstance(found, record) and (isinstance(found, type) or not callable(found)):
        raise ConfigError(f"{flag} {path!r} is a {type(found).__name__}; it must be {kind}")
    return found


def active_terms(loss: Loss, options: Any) -> list[tuple[LossTerm, float]]:
    """The loss and the terms that are on beside it, each with its weight.

    A supervised loss stands alone: what is on in every run is measured beside it, and has weight 0.
    """
    if loss.supervised:
        return [(loss, 1.0), *((term, 0.0) for term in ADDED_TERMS if term.switch is None)]
    on = [term for term in ADDED_TERMS if term.switch is None or getattr(options, term.switch)]
    return [(loss, 1.0), *((term, term.weight(options)) for term in on)]


# Names for --help and messages


def names_where(condition: Callable[[Algorithm], bool]) -> str:
    """The names of the algorithms that meet a condition, in words: "grpo, gspo and ppo"."""
    *most, last = [name for name, algorithm in ALGORITHMS.items() if condition(algorithm)]
    return f"{', '.join(most)} and {last}" if most else last


def readers_of(option: str) -> str:
    """The names of the algorithms whose advantages an option changes, in words."""
    return names_where(lambda algorithm: option in algorithm.reads)


def published_values(option: str) -> str:
    """What papers take for an option where its default will not do, e.g. "0.0003 for gspo"."""
    values = {name: algorithm.loss.published.get(option) for name, algorithm in ALGORITHMS.items()}
    return ", ".join(f"{value:g} for {name}" for name, value in values.items() if value is not None)
