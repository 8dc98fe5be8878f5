"""What to write instead of names of other libraries: of members of a package, of arguments, of fields of a State.

And what to write where torch raises an error of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_LOOP = 'for event, state in pl.fit(model, dataloader, loss=..., optimizer=..., max_duration="3ep"): ...'
_STOPPING = 'write algorithms=[pl.algorithms.early_stopping("val/loss")]'
# Of regression, where outputs have shape (n,) or, from a layer with one output, (n, 1).
_MEAN = "write mean(lambda outputs, batch: (outputs.reshape_as(batch[1]) - batch[1]).{}(), '{}')"

# A key holds several names, separated by spaces.
_HINTS: Mapping[str, Mapping[str, str]] = {
    "pure_loop": {
        "Trainer Learner Experiment Engine Accelerator Fabric": f"training is a generator: {_LOOP}",
        "Config TrainingArguments TrainerConfig Settings": "pl.Recipe(train_dataloader, ...) has the settings of a run",
        "train train_loop training trainer Fit TrainLoop": f"training is a generator: {_LOOP}",
        "test validate eval evaluation": "write pl.evaluate(state, dataloader, loss=...)",
        "inference predict_step": "write pl.predict(state, dataloader)",
        "TrainState Checkpoint": "a run is a pl.State; write pl.save(state, path) and pl.load(path, model=...)",
        "Callbacks": "subclass pl.Callback; those of the library are in pl.callbacks",
        "Algorithms": "decorate a function with pl.algorithm(Event...); those of the library are in pl.algorithms",
        "Events": "the events are the members of pl.Event",
        "DataLoader Dataset": "any iterable of batches serves, torch.utils.data.DataLoader too",
        "Module LightningModule ComposerModel Model": "any torch.nn.Module serves; loss= is a function or a pl.Task",
        "resume load_checkpoint restore": "write pl.load(path, model=...), or fit(..., autoresume=folder)",
        "save_checkpoint": "write pl.save(state, path)",
        "seed_everything set_seed manual_seed seed": "write fit(..., seed=0)",
        "optimizers Adam AdamW SGD": "optimizers are in pl.optim: pl.optim.adamw(lr=3e-4)",
        "scheduler schedulers lr_scheduler schedule": (
            'schedules are in pl.schedules: pl.schedules.cosine("3ep", peak=3e-4)'
        ),
        "metric Accuracy": "metrics are in pl.metrics: pl.metrics.accuracy()",
        "logging": "loggers are in pl.loggers: fit(..., loggers=[pl.loggers.ConsoleLogger()])",
        "EMA SAM": 'methods are in pl.algorithms: pl.algorithms.ema(half_life="100ba")',
        "EarlyStopping EarlyStopper": _STOPPING,
        "Tuner tune LearningRateFinder LRFinder FastaiLRFinder lr_range_test find_lr lr_finder": (
            "write pl.lr_find(model, dataloader, loss=..., optimizer=...)"
        ),
        "BatchSizeFinder BatchSizeScaling find_batch_size auto_scale_batch_size find_executable_batch_size "
        "largest_batch_size auto_microbatch": (
            'write fit(..., microbatch_size="auto"), or pl.largest_microbatch(model, dataloader, ...)'
        ),
        "fast_dev_run sanity_check dry_run check": "write pl.rehearse(...), with the arguments of fit",
        "summary ModelSummary RichModelSummary": "pl.explain(...) prints the layers, given the arguments of fit",
        "Profiler profiler SimpleProfiler AdvancedProfiler PyTorchProfiler": "write pl.profile(pl.fit(...))",
        "export_onnx to_onnx to_torchscript export_for_inference save_pretrained": (
            'write pl.export(state, path, format), "onnx" or "torch.export" with sample=inputs'
        ),
        "accumulate_grad_batches gradient_accumulation accumulate GradientAccumulationScheduler": (
            "write fit(..., batches_per_step=4)"
        ),
        "Rehearsal RangeTest Profile": "the types of what tools return are in pl.typing",
        "best_checkpoint latest_checkpoint find_checkpoint": "write pl.best_path(folder), pl.latest_path(folder)",
        "ComposerClassifier": "pass the torch.nn.Module itself, with loss=torch.nn.functional.cross_entropy",
        "HuggingFaceModel": "pass the model of Transformers itself, with loss=pl.Task.from_transformers()",
        "load_composer from_checkpoint from_torch load_torch": "write pl.from_composer(path, model)",
        "ModelCheckpoint CheckpointSaver": "write callbacks=[pl.callbacks.CheckpointSaver(folder)]",
    },
    "pure_loop.callbacks": {
        "EarlyStopper EarlyStopping": f"what changes training is an algorithm: {_STOPPING}",
        "ThresholdStopper": 'write algorithms=[pl.algorithms.threshold_stopping("val/accuracy", 0.9)]',
        "ReduceLROnPlateau": 'what changes training is an algorithm: pl.algorithms.reduce_on_plateau("val/loss")',
        "NaNMonitor TerminateOnNaN": 'fit raises NonFiniteError by itself; nonfinite="skip" leaves such batches out',
        "RuntimeEstimator Timer": "write TimeLeft(); pl.progress(pl.fit(...)) shows a bar with the time left",
        "ProgressBar TQDMProgressBar RichProgressBar": "pl.progress(pl.fit(...)) shows a bar with the time left",
        "LoadCheckpoint": "write fit(..., load_path=path), or fit(pl.load(path, model=..., weights_only=True), ...)",
        "ModelCheckpoint Checkpoint": "write CheckpointSaver(folder)",
        "LearningRateMonitor": "write LRMonitor(); fit with loggers records the learning rate by itself",
        "ImageLogger LogImages": "write ImageVisualizer()",
        "ExportForInference": 'write ExportForInferenceCallback("model.pt")',
        "MLPerf MLPerfLogger": 'write MLPerfCallback(folder, benchmark, target, "val/accuracy")',
        "NormMonitor OptimizerMonitor GradNormMonitor GradientMonitor": "write GradMonitor()",
        "FreeOutputs": "outputs lose their graph at AFTER_BACKWARD; microbatch_size= makes them smaller",
        "SystemMetricsMonitor DeviceStatsMonitor": "write SystemMonitor() for the machine, MemoryMonitor() for memory",
        "EvalOutputLogging": "write a callback with eval_batch_end, which records rows with logger.log_table",
        "LearningRateFinder LRFinder": "write pl.lr_find(model, dataloader, loss=..., optimizer=...)",
        "BatchSizeFinder": 'write fit(..., microbatch_size="auto"), or pl.largest_microbatch(...)',
        "ModelSummary RichModelSummary": "pl.explain(...), with the arguments of fit, prints the layers",
        "OOMObserver": "write MemorySnapshot(folder, on_oom=True)",
        "ThroughputMonitor": "write SpeedMonitor()",
        "GradientAccumulationScheduler": "write fit(..., batches_per_step=...)",
        "LambdaCallback": "a function of (event, state) is a callback: callbacks=[lambda event, state: ...]",
        "CSVLogger TensorBoard WandbCallback": "write fit(..., loggers=[pl.loggers.CSVLogger(path)])",
        "EMA EMACallback": 'what changes training is an algorithm: pl.algorithms.ema(half_life="100ba")',
        "StochasticWeightAveraging SWA": "what changes training is an algorithm; averages are in pl.algorithms",
    },
    "pure_loop.algorithms": {
        "EMA EMACallback": 'write ema(half_life="100ba")',
        "SWA": "write ema(...), an average of the weights",
        "SAM": "write sam(rho=0.05)",
        "EarlyStopper": 'write early_stopping("val/loss")',
        "ThresholdStopper": 'write threshold_stopping("val/accuracy", 0.9)',
        "clip_grad_norm clip_grad clip": 'write gradient_clipping("norm", 1.0), or fit(..., clip_grad=1.0)',
    },
    "pure_loop.loggers": {
        "WandB WandbLogger WeightsAndBiasesLogger": 'write WandBLogger("project")',
        "TensorboardLogger TensorBoard SummaryWriter": 'write TensorBoardLogger("runs/first")',
        "MLFlow": 'write MLFlowLogger("experiment")',
        "NeptuneAILogger Neptune": 'write NeptuneLogger("workspace/project")',
        "CometLogger CometML Comet": 'write CometMLLogger("project")',
        "CSVFileLogger CSV": 'write CSVLogger("metrics.csv")',
        "FileLogger JSONLogger JSON JSONL TextLogger": (
            'write JSONLinesLogger("metrics.jsonl") or CSVLogger("metrics.csv"); ConsoleLogger(stream=file) writes text'
        ),
        "MosaicMLLogger": "it writes to a platform of its own; RemoteUploader(url) uploads what other loggers write",
        "RemoteUploaderDownloader ObjectStoreLogger": "write RemoteUploader(url)",
        "ProgressBarLogger TQDMLogger ProgressBar": "pl.progress(pl.fit(...)) shows a bar",
        "InMemory MemoryLogger DictLogger": "write InMemoryLogger()",
        "Console stdout print": "write ConsoleLogger()",
        "Slack": "write SlackLogger(url)",
        "LoggerCollection LoggerDestination Logger": "subclass pl.Logger; fit takes several: loggers=[..., ...]",
    },
    "pure_loop.metrics": {
        "acc": "write accuracy()",
        "Accuracy MulticlassAccuracy": "write accuracy()",
        "MaskedAccuracy": "write accuracy(ignore_index=-100)",
        "BinaryAccuracy": "write confusion_matrix(threshold=0.0), or mean(function, 'accuracy')",
        "F1 F1Score BinaryF1Score MulticlassF1Score": "write f1(), or f1(average='binary', threshold=0.0)",
        "MIoU MeanIoU JaccardIndex IoU": "write mean_iou()",
        "Dice DiceScore DiceCoefficient": "write dice()",
        "DiceLoss": "it is a loss: fit(loss=pl.metrics.dice_loss)",
        "MAP MeanAveragePrecision": (
            "write from_torchmetrics(torchmetrics.detection.MeanAveragePrecision(), targets=lambda batch: batch[1])"
        ),
        "CrossEntropy LanguageCrossEntropy LossMetric": "write loss(), which weighs microbatches as training does",
        "Perplexity LanguagePerplexity ppl": "write perplexity()",
        "TopKAccuracy": "write top_k(5)",
        "CalibrationError ECE LanguageECE": "write expected_calibration_error()",
        "MeanMetric Mean": "write mean(function, 'name'), of a function of (outputs, batch)",
        "MSE MeanSquaredError L2": _MEAN.format("square", "mse"),
        "MAE MeanAbsoluteError L1": _MEAN.format("abs", "mae"),
        "AUROC AveragePrecision Precision Recall ROC MetricCollection torchmetrics": (
            "write from_torchmetrics(metric), of any metric of torchmetrics"
        ),
    },
    "pure_loop.optim": {
        "Adam": "write adam(lr=3e-4)",
        "AdamW": "write adamw(lr=3e-4)",
        "SGD": "write sgd(lr=0.1, momentum=0.9)",
        "Lamb": "write lamb(lr=1e-3)",
        "Lion": "write lion(lr=1e-4)",
        "Muon": "write muon(lr=0.02), for matrices alone: partition gives the other parameters to adamw",
        "Adafactor": "write from_torch(torch.optim.Adafactor, lr=1e-2)",
        "RMSprop": "write from_torch(torch.optim.RMSprop, lr=1e-2)",
        "Adagrad Adadelta NAdam RAdam Adamax ASGD Rprop": (
            "write from_torch(cls, lr=...), cls its class in torch.optim"
        ),
        "DecoupledAdamW": "write adamw(lr=..., weight_decay=..., independent_decay=True)",
        "DecoupledSGDW": "write sgd(lr=..., momentum=..., weight_decay=..., independent_decay=True)",
        "lr_scheduler": 'a rate is a function of the timestamp: adamw(lr=pl.schedules.cosine("3ep", peak=3e-4))',
    },
    "pure_loop.schedules": {
        "CosineAnnealingLR CosineAnnealing CosineDecay": 'write cosine("3ep", peak=3e-4)',
        "StepLR StepScheduler": 'write step("10ep", gamma=0.1)',
        "MultiStepLR": 'write multistep(["10ep", "20ep"])',
        "OneCycleLR": 'write one_cycle("3ep", peak=3e-4)',
        "CyclicLR": 'write cyclic("2ep", 1e-4, 1e-3)',
        "CosineAnnealingWarmRestarts CosineAnnealingWarmRestartsScheduler": 'write cosine_restarts("3ep")',
        "PolynomialLR": 'write polynomial("3ep", power=1.0)',
        "ConstantLR": "write constant(1e-3)",
        "SequentialLR ChainedScheduler": "write chain(first, (time, next)), or product([...])",
        "LambdaLR": "any function of the timestamp serves: lr=lambda timestamp: 1e-3 * 0.99**timestamp.epoch",
        "LinearWarmup get_linear_schedule_with_warmup": 'write warmup("100ba", linear(1e-3, 0.0, "3ep"))',
        "get_cosine_schedule_with_warmup": 'write cosine("3ep", peak=3e-4, warmup="100ba")',
        "ExponentialLR ExponentialScheduler": 'write exponential("1ep", gamma=0.9)',
        "LinearLR": 'write linear(1.0, 0.0, "3ep")',
        # Of Composer; "with warmup" is an argument, or a schedule around another one.
        "CosineAnnealingScheduler CosineAnnealingWithWarmupScheduler": 'write cosine("1dur", peak=3e-4, warmup="1ep")',
        "LinearScheduler": 'write linear(1e-3, 0.0, "1dur")',
        "LinearWithWarmupScheduler": 'write warmup("100ba", linear(1e-3, 0.0, "1dur"))',
        "ConstantScheduler ConstantWithWarmupScheduler": 'write constant(1e-3), or warmup("100ba", 1e-3)',
        "MultiStepScheduler MultiStepWithWarmupScheduler": 'write warmup("100ba", multistep(["10ep", "20ep"]))',
        "PolynomialScheduler PolynomialWithWarmupScheduler": 'write polynomial("1dur", power=2.0, warmup="100ba")',
        "ReduceLROnPlateau": 'a schedule knows no metric: pl.algorithms.reduce_on_plateau("val/loss")',
    },
}


# What is written instead of a call of a package.
PACKAGES: Mapping[str, str] = {
    "compile": "write pl.fit(model, dataloader, compile=True, ...)",
    "optim": "write pl.optim.adamw(lr=3e-4)",
    "schedules": 'write pl.schedules.cosine("3ep", peak=3e-4)',
    "testing": "write pl.testing.check_algorithm(algorithm)",
}


def hint(package: str, name: str) -> str | None:
    """What to write instead of a name, however its words are joined; None where nothing is known of it."""
    letters = letters_of(name)
    for names, text in _HINTS.get(package, {}).items():
        if letters in map(letters_of, names.split()):
            return text
    return None


def letters_of(name: str) -> str:
    """A name without what styles of writing differ in: ``MixUp``, ``mix_up`` and ``mixup`` have the letters of one."""
    return name.replace("_", "").lower()


# How an argument is written.
EXAMPLES = {
    "model_or_state": "model",
    "model": "model=module",
    "path": "path",
    "folder": "folder",
    "state": "state",
    "train_dataloader": "train_dataloader",
    "dataloader": "dataloader",
    "evaluators": 'evaluators={"val": dataloader}',
    "loss": "loss=torch.nn.functional.cross_entropy",
    "optimizer": "optimizer=pl.optim.adamw(lr=3e-4)",
    "max_duration": 'max_duration="3ep"',
    "training": "training=False",
    "rewind.model": "model",
    "rewind.when": '"12ba"',
    "rewind.event": '"batch_start"',
    "update_part.loss": "loss=lambda module: ...",
    "optimizers": '{"decay": pl.optim.adamw(weight_decay=0.1), "rest": pl.optim.adamw()}',
    "label": 'label=lambda name, tensor: "decay" if tensor.ndim > 1 else "rest"',
}

# Other libraries' names, by the argument that stands for them here, and what to write; {} is the number given.
_LOADER = "DataLoader(dataset, batch_size={})"
ARGUMENTS: tuple[tuple[str, str, str], ...] = (
    ("loss", "task", "task=pl.Task(forward=...)"),
    ("steps num_steps max_steps", "batches", "batches={}"),
    ("num_training num_iter num_steps n_steps", "steps", "steps={}"),
    ("min_lr start_lr init_lr", "lowest", "lowest={}"),
    ("max_lr end_lr", "highest", "highest={}"),
    ("epochs num_epochs n_epochs max_epochs total_epochs num_train_epochs", "max_duration", 'max_duration="{}ep"'),
    ("steps num_steps max_steps train_steps total_steps iterations", "max_duration", 'max_duration="{}ba"'),
    ("duration", "max_duration", 'max_duration="3ep"'),
    ("task", "loss", "loss=pl.Task(..., loss=lambda outputs, batch: function(outputs, batch[1]))"),
    ("lr learning_rate", "optimizer", "optimizer=pl.optim.adamw(lr={})"),
    ("weight_decay betas", "optimizer", "optimizer=pl.optim.adamw(lr=3e-4, weight_decay=..., betas=...)"),
    ("momentum nesterov", "optimizer", "optimizer=pl.optim.sgd(lr=0.1, momentum=...)"),
    ("optim optimizers", "optimizer", "optimizer=pl.optim.adamw(lr=3e-4)"),
    (
        "scheduler schedulers lr_scheduler schedule lr_schedule",
        "optimizer",
        'optimizer=pl.optim.adamw(lr=pl.schedules.cosine("3ep", peak=3e-4))',
    ),
    ("model module net network state", "model_or_state", "it first and without a name: {call}"),
    (
        "data loader dataloader dataloaders dataset train_data train_loader train_dataset train_set",
        "train_dataloader",
        "it without a name, at its place: {call}",
    ),
    ("data loader dataset train_dataloader test_dataloader", "dataloader", "it second and without a name: {call}"),
    ("data loader dataloader dataset", "evaluators", 'it second and without a name: {call}, or as {{"val": data}}'),
    (
        "val val_data val_loader val_dataloader val_dataloaders valid_loader validation_data eval_dataloader "
        "eval_loader test_loader test_dataloader eval_dataset val_dataset validation_dataset test_dataset",
        "evaluators",
        'evaluators={{"val": dataloader}}',
    ),
    # Of Composer's Trainer.
    ("train_subset_num_batches", "batches_per_epoch", "batches_per_epoch={}"),
    ("eval_subset_num_batches", "evaluators", 'evaluators={{"val": pl.Evaluator(dataloader, batches={})}}'),
    ("train_dataloader_label", "train_dataloader", "no such argument: values of training are named train/..."),
    ("spin_dataloaders", "train_dataloader", "no such argument: a resumed run skips samples by their numbers"),
    ("algorithm_passes", "algorithms", "algorithms=[...], in the order in which they are to run"),
    ("scale_schedule_ratio", "optimizer", "optimizer=pl.optim.adamw(lr=pl.schedules.scaled(schedule, {}))"),
    ("step_schedulers_every_batch", "optimizer", "no such argument: a schedule is a function of the timestamp"),
    (
        "log_to_console console_stream console_log_interval",
        "loggers",
        'loggers=[pl.loggers.ConsoleLogger("1ep", stream=None)]',
    ),
    ("log_traces python_log_level", "loggers", 'logging.getLogger("pure_loop").setLevel("INFO")'),
    ("auto_log_hparams", "loggers", "no such argument: loggers are given the arguments of fit"),
    ("load_object_store load_progress_bar", "load_path", 'load_path="s3://bucket/run/ep1-ba100.safetensors"'),
    (
        "load_weights_only load_strict_model_weights load_ignore_keys load_exclude_algorithms",
        "load_path",
        "pl.load(path, model=model, weights_only=..., strict=..., exclude=...) in the place of the model",
    ),
    (
        "save_filename save_latest_filename save_overwrite save_weights_only save_ignore_keys save_metrics "
        "save_num_checkpoints_to_keep save_latest_remote_file_name",
        "callbacks",
        "callbacks=[pl.callbacks.CheckpointSaver(folder, filename=, latest=, overwrite=, weights_only=, exclude=, "
        "keep_last=)], with those that are needed",
    ),
    (
        "parallelism_config fsdp_config deepspeed_config ddp_sync_strategy",
        "parallel",
        'parallel="shard" or "replicate"',
    ),
    ("dist_timeout", "parallel", 'parallel=pl.distributed.Parallel("replicate", timeout="10m")'),
    ("precision_config", "precision", 'precision="amp_fp8"'),
    (
        "accumulate_train_batch_on_tokens",
        "loss",
        "loss=pl.Task(loss=..., weight=count), with the number of tokens of a batch",
    ),
    ("deterministic_mode", "deterministic", "deterministic=True"),
    ("compile_config", "compile", "compile=True"),
    ("save_ignore_keys", "exclude", 'exclude=["opt_state"]'),
    ("metrics metric compute_metrics", "evaluators", 'evaluators={{"val": pl.Evaluator(dataloader, metrics=[...])}}'),
    ("class_weight class_weights", "loss", "loss=torch.nn.CrossEntropyLoss(weight=tensor)"),
    ("decay ema_decay", "smoothing", 'smoothing={}, or half_life="100ba"'),
    ("loss_fn loss_function criterion objective", "loss", "loss=torch.nn.functional.cross_entropy"),
    (
        "batch_size per_device_train_batch_size",
        "train_dataloader",
        f"train_dataloader={_LOADER}; microbatch_size= is how much of it goes at once",
    ),
    ("batch_size", "evaluators", f'evaluators={{{{"val": {_LOADER}}}}}'),
    ("batch_size", "dataloader", _LOADER),
    (
        "shuffle num_workers collate_fn drop_last sampler",
        "train_dataloader",
        "it as an argument of the DataLoader: DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2)",
    ),
    (
        "accumulate_grad_batches gradient_accumulation_steps accumulation_steps grad_accum accumulate",
        "batches_per_step",
        "batches_per_step={}; microbatch_size= is how many samples of a batch go at once",
    ),
    (
        "auto_scale_batch_size auto_find_batch_size auto_microbatch device_train_microbatch_size",
        "microbatch_size",
        'microbatch_size="auto", halved until it fits',
    ),
    (
        "gradient_clip_val max_grad_norm grad_clip clip_grad_norm max_norm gradient_clipping clip",
        "clip_grad",
        "clip_grad=1.0",
    ),
    ("fp16 float16 half", "precision", 'precision="amp_fp16"'),
    ("amp bf16 mixed_precision dtype autocast", "precision", 'precision="amp_bf16"'),
    ("fp8 float8", "precision", 'precision="amp_fp8"'),
    (
        "auto_lr_find find_lr",
        "optimizer",
        "optimizer=pl.optim.adamw(lr=...), with a rate that pl.lr_find(...) suggests",
    ),
    (
        "fast_dev_run num_sanity_val_steps sanity_check dry_run overfit_batches",
        "watch",
        "pl.rehearse(...), which tries the arguments of fit on one batch of each phase",
    ),
    ("profiler profile", "watch", "pl.profile(pl.{name}(...))"),
    ("accelerator gpus cuda", "device", 'device="cuda"'),
    ("strategy devices ddp fsdp distributed num_nodes", "parallel", 'parallel="replicate", under torchrun'),
    ("random_state random_seed manual_seed", "seed", "seed=0"),
    (
        "resume resume_from resume_from_checkpoint checkpoint checkpoint_path ckpt_path",
        "load_path",
        "load_path=path, or autoresume=folder",
    ),
    ("checkpoint_dir save_dir save_folder output_dir", "autoresume", "autoresume=folder"),
    ("val_interval eval_every eval_steps val_check_interval", "eval_interval", 'eval_interval="1ep"'),
    ("verbose progress progress_bar", "model_or_state", "pl.progress(stream) for a bar, around what fit returns"),
    (
        "t t_max every period step_size total_iters num_training_steps total_steps t_0 duration max_duration",
        "time",
        'time="3ep"',
    ),
    ("times steps", "milestones", 'milestones=["10ep", "20ep"]'),
    ("num_warmup_steps warmup_steps t_warmup", "warmup", 'warmup="100ba"'),
    ("max_lr base_lr lr eta_max", "peak", "peak={}"),
    ("eta_min min_lr", "final", "final={}"),
    ("learning_rate", "lr", "lr={}"),
    ("beta1 beta2 b1 b2", "betas", "betas=(0.9, 0.999)"),
    ("params parameters model", "lr", "no such argument: fit gives an optimizer the parameters"),
    ("events", "watch", "watch={{pl.Event.BATCH_END}}"),
    ("torch_compile compiled", "compile", "compile=True"),
    ("hooks", "callbacks", "callbacks=[...]"),
    ("module net network", "model", "model=module"),
    ("map_location", "device", 'device="cpu"'),
    # Of fit, where others have an argument and here is an algorithm, a callback or a logger.
    ("patience early_stopping early_stop", "algorithms", 'algorithms=[pl.algorithms.early_stopping("val/loss")]'),
    (
        "save_interval save_every save_every_n_steps checkpoint_interval checkpoint_every enable_checkpointing",
        "callbacks",
        'callbacks=[pl.callbacks.CheckpointSaver(folder, interval="1ep")]',
    ),
    ("logger log_dir logdir", "loggers", 'loggers=[pl.loggers.TensorBoardLogger("runs/first")]'),
    # Of callbacks, algorithms that compare a metric, and loggers.
    (
        "dirpath dir directory log_dir logdir save_dir save_folder root_dir output_dir checkpoint_dir default_root_dir",
        "folder",
        'folder="runs/first"',
    ),
    (
        "filename file file_name file_path filepath log_file save_path dirpath dir directory folder log_dir save_dir",
        "path",
        "path=..., the path of the file and not that of its folder",
    ),
    ("monitor monitored quantity", "metric", 'metric="val/loss", the label of an evaluator and a name'),
    (
        "save_top_k keep_top_k top_k save_best save_best_only",
        "keep_best",
        'keep_best={}, metric="val/loss", mode="min"',
    ),
    (
        "max_to_keep save_total_limit save_num_checkpoints_to_keep num_checkpoints_to_keep n_saved save_last",
        "keep_last",
        "keep_last={}",
    ),
    (
        "keep_last save_total_limit keep_best keep max_to_keep save_top_k",
        "autoresume",
        'autoresume=pl.callbacks.CheckpointSaver("runs/1", keep_last=2)',
    ),
    ("signals", "autoresume", 'autoresume=pl.callbacks.CheckpointSaver("runs/1", signals=["TERM", "USR1"])'),
    (
        "stop_before max_time time_limit walltime",
        "autoresume",
        'autoresume=pl.callbacks.CheckpointSaver("runs/1", stop_before="19h50m")',
    ),
    ("trained_only", "autoresume", 'autoresume=pl.callbacks.CheckpointSaver("runs/1", trained_only=True)'),
    ("save_weights_only model_only", "weights_only", "weights_only=True"),
    ("trainable_only adapters_only lora_only save_trainable_only", "trained_only", "trained_only=True"),
    ("max_time time_limit walltime max_runtime job_timeout", "stop_before", 'stop_before="19h50m"'),
    ("add drop remove added dropped", "exclude", 'exclude=["scale"], of names that the file or the model alone has'),
    (
        "migrate rename exclude",
        "load_path",
        "pl.load(path, model=model, rename=..., exclude=[...]) in the model's place",
    ),
    ("load_ignore_keys ignore_keys skip_keys exclude_keys load_exclude_algorithms", "exclude", 'exclude=["head.*"]'),
    ("key_mapping rename_keys mapping prefix", "rename", 'rename={{"backbone.": "encoder."}}'),
    ("auto_insert_metric_name name_format", "filename", 'filename="ep{{epoch}}-ba{{batch}}.safetensors"'),
    (
        "every_n_steps every_n_train_steps every_n_batches log_every_n_steps save_steps save_freq logging_steps",
        "interval",
        'interval="{}ba"',
    ),
    ("every_n_epochs save_every_n_epochs period epoch_interval", "interval", 'interval="{}ep"'),
    (
        "save_interval log_interval logging_interval batch_log_interval save_every log_every every frequency",
        "interval",
        'interval="100ba"',
    ),
    (
        "every_n_steps log_every_n_steps logging_steps log_interval logging_interval flush_interval flush_secs "
        "flush_logs_every_n_steps upload_interval interval",
        "flush",
        'flush="100ba"',
    ),
    ("name run_name display_name run_id id version", "flush", 'fit(..., run_name="first"), one name for all loggers'),
    ("project_name experiment_name", "project", 'project="digits"'),
    ("experiment_name project project_name", "experiment", 'experiment="digits"'),
    ("offline online", "mode", 'mode="offline"'),
    ("init_kwargs wandb_kwargs kwargs config settings experiment_kwargs", "options", "options={{...}}"),
    ("desc title label", "description", 'description="train"'),
    ("total max min", "stream", "no such argument: the stream knows how long it is"),
    ("mininterval", "refresh_seconds", "refresh_seconds={}"),
    ("filter_names names metrics", "include", 'include=["train/*", "val/*"]'),
    ("uri tracking_url", "tracking_uri", 'tracking_uri="sqlite:///mlflow.db"'),
    ("delta min_improvement tolerance threshold", "min_delta", "min_delta={}"),
    ("restore_best_weights restore_best", "best", 'best="keep", and pl.algorithms.restored(state)'),
    ("min_lr eta_min", "min_scale", "min_scale=0.01, a factor of the learning rate"),
    ("window_size", "window", "window={}"),
    ("train mode is_training eval evaluation inference", "training", "state.module(training=False), for eval mode"),
)

# What a recipe has in the place of what is looked for.
RECIPE_PLACES = {
    **dict.fromkeys(("train", "start", "begin", "stream"), "fit(model)"),
    **dict.fromkeys(("validate", "test", "eval"), "evaluate(state)"),
    **dict.fromkeys(("copy", "update", "with_", "evolve"), "replace(...)"),
    **dict.fromkeys(("lr", "learning_rate", "weight_decay"), "optimizer"),
    **dict.fromkeys(("data", "dataloader", "train_loader"), "train_dataloader"),
}
# How other libraries name what a recipe does not hold, and what to write.
MODELS = ("model", "module", "net", "network", "state", "model_or_state")
NO_MODEL = "a recipe has no model, which its methods take: pl.Recipe(train_dataloader, ...).fit(model)"
# An argument that other libraries have at this place, or after it.
PASSED_TWICE = {
    "lr": "; fit gives an optimizer the parameters: pl.optim.adamw(lr=3e-4)",
    "cls": "; fit gives an optimizer the parameters: pl.optim.from_torch(torch.optim.RAdam, lr=1e-3)",
}


# Where the values are that other libraries have under these names.
STATE_PLACES: tuple[tuple[str, str], ...] = (
    ("gradients gradient grad", "gradients are state.grads, by parameter name"),
    (
        "lr learning_rate scheduler lr_scheduler schedule",
        "the learning rate is the optimizer's: optimizer.lr(state.timestamp)",
    ),
    (
        "optimizer optimizers optimizer_state",
        "the optimizer state is state.opt_state; the optimizer itself is the argument of fit",
    ),
    ("step steps global_step batch_idx", "finished batches are state.timestamp.batch"),
    ("epochs current_epoch", "finished epochs are state.timestamp.epoch"),
    (
        "weights parameters state_dict model_state",
        "parameters are state.params, by name; state.module() is a module with them",
    ),
    ("fit", "pl.fit(state, ...) resumes from it"),
    ("named_buffers", "buffers are state.buffers, by name"),
    (
        "net forward train eval",
        "state.module() is a plain module with copies of the parameters; state.module(training=False) is in eval mode",
    ),
    (
        "accuracy val_loss eval_loss metric",
        'metrics are state.metrics[label][name], such as state.metrics["val"]["accuracy"]',
    ),
    ("inputs targets labels", "the batch is state.batch, and the part of it that is computed now state.microbatch"),
    ("predictions output logits", "what the forward returned is state.outputs"),
    ("memory algorithms", "what an algorithm keeps is state.algorithm_state[name]"),
    ("rng generator", "random numbers come from pl.random.generator(state.seed, name, state.timestamp.batch)"),
    ("scaler grad_scaler", "the loss scale is state.loss_scale"),
    ("load_state_dict", "write state.replace(params=...), or pl.load(path, model=...)"),
    ("to cuda cpu", "a run has its device from fit(..., device=...), a module from state.module().to(device)"),
    ("stop_training should_stop trainer", "write an algorithm that returns state.replace(stop=True), or break"),
    ("backward zero_grad optimizer_step", "gradients and the optimizer's step are fit's: no code calls them"),
    ("save save_checkpoint", "write pl.save(state, path)"),
    ("log log_metrics", "in a callback's method write logger.log_metrics({name: value}, state)"),
    ("callbacks loggers dataloader train_dataloader evaluators", "it is an argument of fit, and not in the State"),
    ("rank world_size", "ranks are pl.distributed.rank() and pl.distributed.world_size()"),
)

# What is wrong with a value for such a field of a State; {} is its class.
_TIMESTAMP = (
    "a timestamp is a pl.Timestamp, and state.replace was given {}: write state.timestamp.next_epoch(), or "
    "state.timestamp.replace(batch=100)."
)
SEED_OF_MEMBERS = (
    "state.replace(seed=...): each member of this State has a seed of its own: fork them one by one, "
    "pl.stack([state.member(i).replace(seed=i + 100) for i in range(state.members)]); or give the data they share "
    "another order, state.replace(data_seed=...)."
)
STATE_KINDS = {
    "model": "state.replace takes the structure of a model, and was given {}: for a module write "
    "state.with_module(module).",
    "timestamp": _TIMESTAMP,
    "previous_timestamp": "previous_timestamp is a pl.Timestamp, and state.replace was given {}: write "
    "state.replace(previous_timestamp=state.timestamp).",
    "seed": "seed is a whole number, and state.replace was given {}: write state.replace(seed=0).",
}
# What to write for a name that a mapping of a State lacks, by the field that it is.
STATE_MAPPINGS = {
    "metrics": 'state.metrics["val"]["loss"] comes with fit(..., evaluators={"val": dataloader}). At the BATCH_END or '
    "EPOCH_END before an evaluation its old metrics are left out: read the new ones at BATCH_CHECKPOINT or "
    "EPOCH_CHECKPOINT",
    "train": 'state.metrics["train"]["accuracy"] comes with fit(..., train_metrics=[pl.metrics.accuracy()]); the loss '
    "of a batch is state.loss at BATCH_END",
    "algorithm_state": "An algorithm's memory begins with pl.Algorithm(name, handlers, init=lambda state: ...), or "
    "with its first state.remember(name, memory)",
}


def squeezed(name: str) -> str:
    """What to write where outputs or targets of a loss have a last dimension of 1 too many."""
    pair = ", ".join(f"{each}.squeeze(-1)" if each == name else each for each in ("outputs", "targets"))
    return f"the {name} have a dimension too many: write loss=lambda outputs, targets: function({pair})"


# What a message of torch's says, as a pattern of it and the notes of the error, and what to write; {0} is the pattern's
# first group. By the note of where it was raised: the message alone may have another cause there.
_SEVERAL = "loss=lambda outputs, targets: function(outputs[...], targets), with the index or the key of the tensor"
_BY_KEY = "loss=pl.Task(forward=lambda model, batch: model(batch[0][...]), loss=lambda outputs, batch: ...)"
_STARRED = _BY_KEY.replace("batch[0][...]", "*batch[0]")
_FLOAT = r"(?:torch\.cuda\.Float|float)"
_IN_FORWARD: tuple[tuple[str, str], ...] = (
    (r"must be Tensor, not NoneType", "the forward of a module before it gave None: is a `return` missing?"),
    (
        r"must be Tensor, not numpy",
        "batches hold tensors: write torch.from_numpy(array), or a DataLoader of samples, which makes tensors of them",
    ),
    (
        r"must be Tensor, not (?:list|tuple|str)\b.*of inputs \((?:\d+ texts|str)",
        "a model computes with numbers: give what a tokenizer makes of the texts",
    ),
    (
        r"must be Tensor, not (tuple|list)",
        f"a layer takes one tensor, and got a {{0}}: of several inputs write {_STARRED}, of an LSTM's output, (h, c) "
        "pass on the output, and of numbers make a tensor in the dataset",
    ),
    (r"must be Tensor, not dict", f"inputs in a dict are read by their keys: write {_BY_KEY}"),
    (
        rf"got (?!Float)\w+ and Float|Input type \((?!{_FLOAT}|torch\.\w+T)[\w. ]+\) and \w+ type \({_FLOAT}",
        "inputs have the dtype of the parameters, float32: write inputs.float() in the dataset, and for images of "
        "bytes image.float() / 255",
    ),
    (
        rf"got Float and |Input type \({_FLOAT}\w*\) and \w+ type \((?!{_FLOAT})(?!torch\.FloatT)",
        "the parameters have another dtype than the inputs, float32: leave them in float32, model.float(), and write "
        'precision="amp_bf16" to compute in bfloat16',
    ),
    (
        r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x",
        "the last dimension of the inputs is {0}, and this layer takes {1}: write one that takes {0}, or nn.Flatten() "
        "before it",
    ),
    (
        r"expected input\[1, \d+, \d+, \d+\] to have \d+ channels.*of inputs \(tensor \(\d+, \d+, \d+\)",
        "these images have no dimension for channels: write image[None] in the dataset, inputs[:, None] in the forward",
    ),
    (
        r"expected input\[\d+, \d+, \d+, (\d+)\] to have \1 channels",
        "the channels of these images are last, and come before height and width: write image.permute(2, 0, 1) in the "
        "dataset, inputs.permute(0, 3, 1, 2) in the forward",
    ),
    (
        r"to have (\d+) channels, but got (\d+) channels",
        "this layer takes {0} channels, and the inputs have {1}: write a layer of {1}, or, where 1 channel stands for "
        "several, inputs.expand(-1, {0}, -1, -1) in the forward",
    ),
    (
        r"^Expected more than 1 value per channel",
        "a batch norm needs several samples: DataLoader(..., drop_last=True), or a larger microbatch_size",
    ),
    (
        r"forward\(\) missing .*raised in the model, [^\n]*of inputs \([(\[]",
        f"a model is called with the first part of a batch: for several inputs in it write {_STARRED}",
    ),
    (
        r"forward\(\) missing \d+ required positional.*raised in the model, ",
        "a model is called with the first part of a batch: for more inputs write loss=pl.Task(forward=lambda model, "
        "batch: model(batch[0], batch[1]), loss=lambda outputs, batch: function(outputs, batch[2]))",
    ),
    (
        r"^index out of range in self.*, Embedding\(",
        "an Embedding(n, ...) has rows for the indices 0 to n - 1: n is the size of the vocabulary, len(tokenizer), "
        "and for positions the longest sequence",
    ),
    (r"argument #1 'indices' to have", "an Embedding takes integers: inputs.long()"),
    (
        r"^Expected all tensors to be on the same device|Input type \(torch\.\w*Tensor|type \(torch\.FloatTensor",
        "a forward makes tensors on the device of its inputs, torch.zeros(..., device=x.device), and a module keeps a "
        "tensor as a buffer, register_buffer(name, tensor)",
    ),
)
_IN_LOSS: tuple[tuple[str, str], ...] = (
    (
        r"(?:must be Tensor, not (?:tuple|list|dict)|object has no attribute 'size').*"
        r"raised by the loss \w+\(outputs, batch\), of outputs tensor",
        "the loss of a Task is called with the batch: write loss=lambda outputs, batch: function(outputs, batch[1])",
    ),
    (r"argument 'input' .*must be Tensor, not NoneType", "the forward gave None: is a `return` missing?"),
    (r"not implemented for 'Long'", "a loss is called as loss(outputs, targets): are they swapped in it?"),
    (
        r"^all elements of input should be between 0 and 1",
        "these outputs are no probabilities, or NaN: write torch.nn.functional.binary_cross_entropy_with_logits",
    ),
    (
        r"argument 'input' .*must be Tensor, not (\w+)|^'(?:tuple|list|dict)' object has no attribute 'size'",
        f"the outputs are several tensors, and this loss takes one: write {_SEVERAL}",
    ),
    (
        r"argument 'target' .*must be Tensor, not (\w+)",
        "targets are tensors, and these are a {0}: make tensors in the dataset, of a text the number of its class, "
        "classes.index(text)",
    ),
    (
        r"^Target -?\d+ is out of bounds",
        "classes count from 0, and the last layer has an output for each of them; a target that doesn't count is -100",
    ),
    (
        r"xpected (?:target dtype|scalar type Long|floating point type for target with class prob)",
        "for cross_entropy, classes are int64 (targets.long()) and probabilities float32 (targets.float()), in the "
        "shape of the outputs; numbers to predict take torch.nn.functional.mse_loss",
    ),
    (r"expected scalar type Float", "write .float() for the targets, and for the weight= of the loss if it has one"),
    (
        r"multi-target not supported",
        "the targets have a dimension too many: targets.squeeze(1), or targets.argmax(1) where they are one-hot",
    ),
    (r"[Tt]arget size \(.*outputs tensor \((.*), 1\) \S+ and targets tensor \(\1,?\)", squeezed("outputs")),
    (r"[Tt]arget size \(.*outputs tensor \((.*?),?\) \S+ and targets tensor \(\1, 1\)", squeezed("targets")),
    (r"can't be cast to the desired output type", "this loss takes targets.float()"),
    (
        r"^only batches of spatial targets|^Expected target size \[",
        "cross_entropy takes outputs of shape (batch, classes, ...): write nn.Flatten() before the last layer, or, "
        "where the classes are the last dimension, cross_entropy(outputs.flatten(0, -2), targets.flatten())",
    ),
    (
        r"^Expected input batch_size",
        "there are more or fewer outputs than targets: a forward keeps the samples apart, x.flatten(1) and not "
        "x.view(-1, ...)",
    ),
    (
        r"^Expected all tensors to be on the same device",
        "a tensor of the loss, such as its weight=, is on another device: weight.to(device)",
    ),
)
_IN_DATA: tuple[tuple[str, str], ...] = (
    (
        r"stack expects each tensor to be equal size|resize storage that is not resizable",
        "the samples of a batch have several shapes: resize, crop or pad them in the dataset, or pad them in "
        "DataLoader(..., collate_fn=...), with torch.nn.utils.rnn.pad_sequence",
    ),
    (r"default_collate: .*found <class 'NoneType'>", "a sample has None: is a `return` missing in the dataset?"),
    (
        r"default_collate: .*found <class '(.*?)'>",
        "a sample has a {0}: make tensors in the dataset, torch.from_numpy(numpy.array(image)) of an image",
    ),
    (r"can't be cast to the desired output type", "write image = image.float() / 255 in place of image /= 255"),
)
_IN_BACKWARD: tuple[tuple[str, str], ...] = (
    (
        r"^Trying to backward through the graph a second time",
        "the loop runs the backward: no .backward() in a loss, a forward or the body of the loop; and a tensor of an "
        "earlier forward, such as a hidden state, is kept as hidden.detach()",
    ),
    (
        r"modified by an inplace operation",
        "a layer has overwritten what a gradient needs: write ReLU(inplace=False), and x = x + 1 in place of x += 1",
    ),
    (r"^Found dtype \w+ but expected Float", "the targets have another dtype than the outputs: targets.float()"),
)
_IN_HANDLERS: tuple[tuple[str, str], ...] = (
    (
        r"mixed torch.Tensor and DTensor",
        "with parallel='shard' params, grads and opt_state are DTensors: pl.distributed.shard_like(whole, "
        "state.params[name]) makes one of a whole tensor",
    ),
    (
        r"^(?:'NoneType' object |unsupported operand type.*'NoneType')",
        "if it is a field of a State, that is None before the event that sets it; gradients are in state.grads, not in "
        ".grad",
    ),
    (
        r"^(?:only one element tensors|a Tensor with \d+ elements|Boolean value of Tensor with more)",
        "if it is the State of an ensemble, its loss and metrics hold a number of each member: write loss.mean(), or "
        "each_member = True in the callback, which then sees one model at a time",
    ),
)
_OF_TORCH = {
    "raised by the loss ": _IN_LOSS,
    "raised in the forward ": _IN_FORWARD,
    "raised in the backward ": _IN_BACKWARD,
    "raised by algorithm ": _IN_HANDLERS,
    "raised by callback ": _IN_HANDLERS,
    "": _IN_DATA,
}


def advice_of_torch(message: str, notes: Iterable[str]) -> str | None:
    """What to write where torch raises an error with this message; None where nothing is known of it.

    The notes of the error say where it was raised, and of what.

    >>> advice_of_torch("Found dtype Double but expected Float", ["raised in the backward of batch 0"])
    'the targets have another dtype than the outputs: targets.float()'
    """
    text = "\n".join([message, *notes])
    rows = next(rows for place, rows in _OF_TORCH.items() if place in text)
    for pattern, advice in rows:
        match = re.search(pattern, text, re.DOTALL)
        if match is not None:
            return advice.format(*match.groups())
    return None
