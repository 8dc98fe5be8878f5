"""What each golden stream is: plain values, drawn from the number of the stream alone."""

from __future__ import annotations

import random
from typing import Any

from bench.models import BATCHES_OF, MODELS

__all__ = ["KINDS", "NUMBERS", "Plan", "kind_of", "plan_of"]

Plan = dict[str, Any]

KINDS = {"eager": range(420), "ranks": range(420, 450), "compiled": range(450, 500)}
"""The numbers of each kind."""

NUMBERS = range(500)

# Often, those that most runs are like.
_MODELS = [*MODELS, "plain", "mlp", "mlp", "drops", "conv", "tied", "unused", "transformer"]
_RATES = (
    *("constant", "constant", "linear", "cosine", "warmup", "step", "multistep", "one_cycle", "piecewise"),
    *("inverse_sqrt", "exponential", "polynomial", "chain", "product", "own", "cyclic"),
)
_OPTIMIZERS = (
    *("adamw", "adamw", "adamw_amsgrad", "adamw_independent", "adamw_scheduled", "adam", "adam_decay"),
    *("sgd", "sgd_momentum", "sgd_nesterov", "sgd_dampened", "sgd_maximize", "lamb", "lion", "muon"),
    *("rmsprop", "adagrad", "radam", "partition", "partition_of_torch", "master_weights"),
)
_OF_ANY = (
    *("gradient_clipping_norm", "gradient_clipping_value", "gradient_clipping_adaptive", "gradient_noise"),
    *("ema", "ema_smoothing", "lookahead", "sam", "sam_adaptive", "swa", "layer_freezing", "early_stopping"),
    *("reduce_on_plateau", "threshold_stopping", "penalty", "lr_scale", "stop", "freeze", "selective_backprop"),
)
_OF_CLASSES = ("label_smoothing", "mixup")
_OF_IMAGES = (
    *("cutout", "cutmix", "colout", "progressive_resizing", "blurpool", "squeeze_excite", "channels_last"),
    *("ghost_batchnorm", "weight_standardization", "factorize", "augmix", "randaugment"),
)
_MICROBATCHES = (None, None, 2, 3, 4, "auto")
_EVENTS = (
    *("INIT", "FIT_START", "EPOCH_START", "BATCH_START", "BEFORE_FORWARD", "AFTER_FORWARD", "AFTER_LOSS"),
    *("BEFORE_BACKWARD", "AFTER_BACKWARD", "AFTER_TRAIN_BATCH", "BATCH_END", "BATCH_CHECKPOINT", "EPOCH_END"),
    *("EPOCH_CHECKPOINT", "EVAL_START", "EVAL_AFTER_FORWARD", "EVAL_END", "FIT_END", "ITERATION_END"),
)


def kind_of(number: int) -> str:
    """Which kind of stream has this number."""
    return next(kind for kind, numbers in KINDS.items() if number in numbers)


def plan_of(number: int) -> Plan:
    """The plan of the stream of this number; no other number, and no other draw, has a part in it."""
    draw = random.Random(f"golden stream {number}")
    kind = kind_of(number)
    model = draw.choice([name for name in _MODELS if _serves(name, kind)])
    plan: Plan = {"kind": kind, "model": model, "seed": draw.randrange(1000)}
    plan |= _data(draw, model, kind)
    plan |= _loss(draw, model, kind)
    plan |= _optimizer(draw, model, kind)
    plan |= _length(draw, plan)
    plan |= _evaluation(draw, plan)
    plan |= _numerics(draw, plan)
    plan |= _shape_of_steps(draw, plan)
    plan["algorithms"] = _algorithms(draw, plan)
    plan["callbacks"] = draw.choice([[], [], [], ["grad_monitor"], ["lr_monitor"], ["reader"], ["speed_monitor"]])
    plan |= _observation(draw, plan)
    plan |= _entry(draw, plan)
    return _fitted(plan)


def _serves(model: str, kind: str) -> bool:
    refused = {
        "ranks": ("sparse", "wide", "sometimes", "half"),
        "compiled": ("sparse", "wide", "sometimes", "recurrent"),
    }
    return model not in refused.get(kind, ())


def _data(draw: random.Random, model: str, kind: str) -> Plan:
    least = 4 if model in ("mlp", "conv") or kind == "ranks" else 1
    full = draw.choice([4, 6, 8])
    sizes = [full] * draw.choice([1, 2, 2, 3] if kind == "eager" else [1, 2])
    if draw.random() < 0.6:
        sizes.append(draw.randint(least, full))  # the ragged one
    source = draw.choice(["list", "list", "list", "loader", "loader_shuffled", "unsized", "endless"])
    return {"sizes": sizes, "source": "list" if model == "named" and source.startswith("loader") else source}


def _loss(draw: random.Random, model: str, kind: str) -> Plan:
    if model == "named":
        return {"loss": "own", "ignored": False}
    if model == "double":
        return {"loss": draw.choice(["mse", "summed"]), "ignored": False}
    loss = draw.choice(["entropy", "entropy", "entropy", "parts", "task", "counted"])
    if kind == "compiled" and loss == "counted":
        loss = "task"  # a number of Python can't be read of a graph
    return {"loss": loss, "ignored": loss == "entropy" and draw.random() < 0.2}


def _optimizer(draw: random.Random, model: str, kind: str) -> Plan:
    names = list(_OPTIMIZERS)
    if model == "sparse":
        names = ["sparse_adam", "sparse_adam", "adagrad"]
    elif model == "half":
        names = ["master_weights", "master_weights", "adamw", "sgd_momentum", "sgd"]
    elif kind == "compiled":
        names = [name for name in names if name not in ("rmsprop", "adagrad", "radam", "partition_of_torch")]
    return {"optimizer": draw.choice(names), "rate": draw.choice(_RATES), "rate_unit": draw.choice(["ba", "ep", "dur"])}


def _length(draw: random.Random, plan: Plan) -> Plan:
    order = "2021" if plan["kind"] != "ranks" and draw.random() < 0.12 else "current"
    units = ["ep", "ep", "ep", "ba", "ba", "sp", "tok", "s", "iter"]
    if plan["kind"] != "eager":
        units = ["ep", "ep", "ba", "sp"]
    unit = draw.choice([each for each in units if order == "current" or each != "iter"])
    samples = sum(plan["sizes"])
    iteration = None
    if unit == "iter":
        iteration = draw.choice(["1ep", f"{samples}tok", f"{max(1, samples // 2)}tok"])
    elif order == "current" and draw.random() < 0.15:
        iteration = draw.choice(["1ep", "2ep", f"{max(2, samples)}tok"])
    number = {
        "ep": draw.choice([1, 2, 2, 3, 4]),
        "ba": draw.randint(1, 9),
        "sp": draw.randint(1, 3 * samples),
        "tok": draw.randint(1, 9 * samples),
        "s": draw.randint(1, 5),
        "iter": draw.randint(1, 3),
    }[unit]
    cut, grouped = None, draw.choice([1, 1, 1, 1, 1, 2, 3]) if plan["kind"] == "eager" else 1
    if plan["source"] == "endless" or draw.random() < 0.15:
        cut = draw.randint(1, max(1, len(plan["sizes"]) // grouped))
    return {
        "duration": f"{number}{unit}",
        "iteration_length": iteration,
        "order": order,
        "batches_per_epoch": cut,
        "batches_per_step": grouped,
    }


def _evaluation(draw: random.Random, plan: Plan) -> Plan:
    def interval() -> Any:
        units = ["1ep", "1ba", "2ba", f"{sum(plan['sizes']) // 2 + 1}sp", "2ep", 0]
        if not plan["duration"].endswith("iter"):
            units += ["0.5dur", "0.3dur"]
        return draw.choice(units)

    evaluators = [
        {
            "label": label,
            "sizes": [draw.randint(2, 5) for _ in range(draw.choice([1, 2]))],
            "interval": draw.choice([None, interval()]),
            "microbatch_size": draw.choice([None, None, 2]),
            "metrics": draw.choice([None, None, "loss", "several"]),
            "gradients": draw.random() < 0.1,
        }
        for label in draw.choice([[], [], ["val"], ["val"], ["val", "test"]])
    ]
    train = draw.choice([None, None, None, "loss", "several"])
    return {"evaluators": evaluators, "eval_interval": interval(), "train_metrics": train}


def _numerics(draw: random.Random, plan: Plan) -> Plan:
    precision = draw.choice(["fp32", "fp32", "fp32", "fp32", "amp_bf16", "amp_fp16"])
    if plan["model"] in ("double", "half", "sparse", "recurrent"):
        precision = "fp32"
    nan = draw.randrange(len(plan["sizes"])) if draw.random() < 0.15 else None
    return {
        "precision": precision,
        "clip_grad": draw.choice([None, None, None, 0.5, 0.05, "function"]),
        "nonfinite": draw.choice(["skip", "skip", "skip", "error"])
        if nan is not None
        else draw.choice(["error", "skip"]),
        "nan": nan,
    }


def _shape_of_steps(draw: random.Random, plan: Plan) -> Plan:
    size = draw.choice(_MICROBATCHES)
    if plan["kind"] == "compiled" and size == "auto":
        size = None
    return {"microbatch_size": size}


def _algorithms(draw: random.Random, plan: Plan) -> list[str]:
    names = list(_OF_ANY)
    if plan["loss"] in ("entropy", "parts") and plan["model"] != "half" and not plan["ignored"]:
        names += list(_OF_CLASSES) * 2 if BATCHES_OF[plan["model"]] in ("vectors", "images") else ["label_smoothing"]
    if plan["model"] == "conv":
        names += _OF_IMAGES
    if plan["model"] == "drops":
        names += ["gyro_dropout"] * 3
    if plan["model"] == "transformer":
        names += ["low_precision_layernorm", "sequence_length_warmup", "alibi"]
    if plan["kind"] == "compiled":
        names = [name for name in names if name in _COMPILED]
    if plan["kind"] == "ranks":
        names = [name for name in names if name in _OF_RANKS]
    return draw.sample(sorted(set(names)), draw.choice([0, 0, 1, 1, 2, 3]))


_COMPILED = (
    *("gradient_clipping_norm", "gradient_clipping_value", "gradient_clipping_adaptive", "gradient_noise", "ema"),
    *("sam", "lookahead", "label_smoothing", "mixup", "cutout", "penalty", "lr_scale", "ema_smoothing"),
)
_OF_RANKS = (
    *("gradient_clipping_norm", "gradient_clipping_value", "ema", "sam", "lookahead", "swa", "label_smoothing"),
    *("penalty", "lr_scale", "stop", "layer_freezing", "early_stopping"),
)


def _observation(draw: random.Random, plan: Plan) -> Plan:
    watches: list[Any] = [None, None, ["BATCH_END"], ["EPOCH_END", "FIT_END"], "random", "random"]
    if plan["kind"] == "compiled":
        watches = [["BATCH_END"], ["EPOCH_END", "FIT_END"], "random", None]
    watch = draw.choice(watches)
    if watch == "random":
        watch = sorted({*draw.sample(_EVENTS, draw.randint(1, 7)), draw.choice(["BATCH_END", "FIT_END"])})
    donate = draw.choice(["auto", "auto", "auto", False, True])
    consumers = ["reads", "reads", "glances", "last", "keeps", "keeps_some", "keeps_params", "resumes", "leaves"]
    consumer = draw.choice(["reads", "glances"] if plan["kind"] == "ranks" else consumers)
    if donate is True and consumer.startswith(("keeps", "resumes")):
        consumer = "reads"
    return {
        "watch": watch,
        "donate": donate,
        "consumer": consumer,
        "at": draw.randint(1, 6),
        "strict": draw.choice([None, None, None, False, True]),
        "deterministic": draw.random() < 0.05,
        "verify": "2ba" if plan["kind"] == "eager" and draw.random() < 0.05 else None,
    }


def _entry(draw: random.Random, plan: Plan) -> Plan:
    if plan["kind"] == "ranks":
        shardable = plan["optimizer"] not in ("lamb", "muon", "rmsprop", "adagrad", "radam", "partition_of_torch")
        return {"entry": "fit", "parallel": draw.choice(["replicate", "shard"]) if shardable else "replicate"}
    if plan["kind"] == "compiled":
        return {"entry": "fit", "steps_per_call": draw.choice([1, 1, 2, 3])}
    entry = draw.choice(["fit"] * 10 + ["drive", "drive_plain", "evaluate", "predict"])
    return {"entry": entry}


def _fitted(plan: Plan) -> Plan:
    """The plan without what the library refuses together, so that nearly all of them run."""
    algorithms = plan["algorithms"]
    if plan["model"] in ("mlp", "conv") and plan["kind"] != "ranks":
        # A BatchNorm needs two values for a channel.
        plan["microbatch_size"] = {3: 4, 2: 4}.get(plan["microbatch_size"], plan["microbatch_size"])
        plan["sizes"] = [max(size, 4) if size != 5 else 4 for size in plan["sizes"]]
    if plan["order"] == "2021":
        plan["iteration_length"] = None
    monitored = [name for name in algorithms if name in ("early_stopping", "reduce_on_plateau", "threshold_stopping")]
    if monitored and not any(each["label"] == "val" for each in plan["evaluators"]):
        kept = {"sizes": [3, 2], "interval": "1ba", "microbatch_size": None, "metrics": None, "gradients": False}
        plan["evaluators"] = [{"label": "val", **kept}]
    if monitored:
        for each in plan["evaluators"]:
            each["metrics"] = None
            each["interval"] = each["interval"] or "1ba"
    if plan["rate"] in ("cosine", "warmup", "one_cycle", "inverse_sqrt"):
        # A warmup that is not over before the end is refused.
        plan["rate_unit"] = "dur"
        if plan["duration"].endswith("iter"):
            plan["rate"] = "linear"
    if plan["duration"].endswith("iter"):
        plan["rate_unit"] = "ba"
        plan["algorithms"] = [name for name in algorithms if name not in _IN_FRACTIONS]
    if plan["kind"] == "compiled":
        plan["callbacks"] = [name for name in plan["callbacks"] if name == "lr_monitor"]
        plan["deterministic"] = False
        if plan["order"] == "2021":
            plan["steps_per_call"] = 1
        if plan["nonfinite"] == "skip" or plan["precision"] == "amp_fp16":
            # Steps that may be skipped are not to be counted in Python.
            plan["optimizer"] = {"lamb": "adamw", "sgd_dampened": "sgd_momentum"}.get(
                plan["optimizer"], plan["optimizer"]
            )
            plan["model"] = {"unused": "plain", "tied": "plain"}.get(plan["model"], plan["model"])
    if plan["entry"] in ("evaluate", "predict"):
        plan["algorithms"] = [name for name in plan["algorithms"] if name == "low_precision_layernorm"]
        plan["consumer"] = {"resumes": "reads", "leaves": "reads"}.get(plan["consumer"], plan["consumer"])
        plan["watch"] = plan["callbacks"] = None
    if plan["entry"] in ("drive", "drive_plain"):
        plan["callbacks"] = [name for name in plan["callbacks"] if name != "lr_monitor"]
        plan["watch"] = plan["watch"] and sorted({*plan["watch"], "BATCH_END"})
        plan["model"] = {"tied": "plain"}.get(plan["model"], plan["model"])  # a script sees to frozen parameters itself
        plan["consumer"] = {"last": "reads"}.get(plan["consumer"], plan["consumer"])
    if plan["consumer"] == "last" and plan["watch"] and not {"EPOCH_END", "FIT_END"}.intersection(plan["watch"]):
        plan["consumer"] = "reads"
    return plan


_IN_FRACTIONS = ("swa", "layer_freezing", "progressive_resizing", "selective_backprop", "sequence_length_warmup")
