"""What to write instead of names of other libraries, by the package in which they are looked up."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["hint"]

_LOOP = 'for event, state in pl.fit(model, dataloader, loss=..., optimizer=..., max_duration="3ep"): ...'
_STOPPING = 'write algorithms=[pl.algorithms.early_stopping("val/loss")]'

# A key holds several names, separated by spaces.
_HINTS: Mapping[str, Mapping[str, str]] = {
    "pure_loop": {
        "Trainer Learner Experiment Engine Accelerator Fabric": f"training is a generator: {_LOOP}",
        "train train_loop training trainer Fit TrainLoop": f"training is a generator: {_LOOP}",
        "test validate eval evaluation": "write pl.evaluate(state, dataloader, loss=...)",
        "inference predict_step": "write pl.predict(state, dataloader)",
        "TrainState Checkpoint": "a run is a pl.State; write pl.save(state, path) and pl.load(path, model=...)",
        "Callbacks": "subclass pl.Callback; those of the library are in pl.callbacks",
        "Algorithms": "decorate a function with pl.algorithm(Event...); those of the library are in pl.algorithms",
        "Events": "the events are the members of pl.Event",
        "DataLoader Dataset": "any iterable of batches serves, torch.utils.data.DataLoader too",
        "Module LightningModule ComposerModel Model": "any torch.nn.Module serves, with loss= or task=pl.Task(...)",
        "resume load_checkpoint restore": "write pl.load(path, model=...), or fit(..., autoresume=folder)",
        "save_checkpoint": "write pl.save(state, path)",
        "seed_everything set_seed manual_seed seed": "write fit(..., seed=0)",
        "optimizers Adam AdamW SGD adam adamw sgd": "optimizers are in pl.optim: pl.optim.adamw(lr=3e-4)",
        "scheduler schedulers lr_scheduler schedule": "schedules are in pl.schedules, such as cosine",
        "metric Accuracy accuracy": "metrics are in pl.metrics: pl.metrics.accuracy()",
        "logging": "loggers are in pl.loggers: fit(..., loggers=[pl.loggers.ConsoleLogger()])",
        "EMA ema SAM sam": 'methods are in pl.algorithms: pl.algorithms.ema(half_life="100ba")',
        "EarlyStopping EarlyStopper early_stopping": _STOPPING,
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
        "WandbLogger WANDBLogger WeightsAndBiasesLogger": 'write WandBLogger("project")',
        "TensorboardLogger TensorBoard SummaryWriter": 'write TensorBoardLogger("runs/first")',
        "MLflowLogger MlflowLogger MLFlow MLflow": 'write MLFlowLogger("experiment")',
        "NeptuneAILogger Neptune": 'write NeptuneLogger("workspace/project")',
        "CometLogger CometMlLogger Comet": 'write CometMLLogger("project")',
        "CSVFileLogger CsvLogger": 'write CSVLogger("metrics.csv")',
        "FileLogger JSONLogger JsonLogger TextLogger": (
            'write JSONLinesLogger("metrics.jsonl") or CSVLogger("metrics.csv"); ConsoleLogger(stream=file) writes text'
        ),
        "MosaicMLLogger": "it writes to a platform of its own; RemoteUploader(url) uploads what other loggers write",
        "RemoteUploaderDownloader ObjectStoreLogger": "write RemoteUploader(url)",
        "ProgressBarLogger TQDMLogger ProgressBar": "pl.progress(pl.fit(...)) shows a bar",
        "InMemory MemoryLogger DictLogger": "write InMemoryLogger()",
        "LoggerCollection LoggerDestination Logger": "subclass pl.Logger; fit takes several: loggers=[..., ...]",
    },
    "pure_loop.metrics": {
        "Accuracy MulticlassAccuracy MaskedAccuracy": "write accuracy(ignore_index=-100)",
        "BinaryAccuracy": "write confusion_matrix(threshold=0.0), or mean(function, 'accuracy')",
        "F1 F1Score BinaryF1Score MulticlassF1Score": "write f1(), or f1(average='binary', threshold=0.0)",
        "MIoU MeanIoU JaccardIndex IoU iou": "write mean_iou()",
        "Dice DiceScore DiceCoefficient": "write dice()",
        "DiceLoss": "write fit(loss=pl.metrics.dice_loss)",
        "MAP MeanAveragePrecision mean_average_precision": (
            "write from_torchmetrics(torchmetrics.detection.MeanAveragePrecision(), targets=lambda batch: batch[1])"
        ),
        "CrossEntropy LanguageCrossEntropy LossMetric": "write loss(), which weighs microbatches as training does",
        "Perplexity LanguagePerplexity": "write perplexity()",
        "ConfusionMatrix": "write confusion_matrix()",
        "TopK TopKAccuracy top_k_accuracy": "write top_k(5)",
        "CalibrationError ECE ece LanguageECE": "write expected_calibration_error()",
        "MeanMetric Mean MSE MAE MeanSquaredError MeanAbsoluteError": (
            "write mean(lambda outputs, batch: (outputs - batch[1]).square(), 'mse')"
        ),
        "AUROC AveragePrecision Precision Recall precision recall auroc ROC MetricCollection torchmetrics": (
            "write from_torchmetrics(metric), of any metric of torchmetrics"
        ),
    },
    "pure_loop.optim": {
        "Adam": "write adam(lr=3e-4)",
        "AdamW": "write adamw(lr=3e-4)",
        "SGD": "write sgd(lr=0.1, momentum=0.9)",
        "Lamb LAMB": "write lamb(lr=1e-3)",
        "Lion": "write lion(lr=1e-4)",
        "Muon": "write muon(lr=0.02), for matrices alone: partition gives the other parameters to adamw",
        "Adafactor adafactor": "write from_torch(torch.optim.Adafactor, lr=1e-2)",
        "RMSprop Adagrad Adadelta NAdam RAdam Adamax": "write from_torch(cls, lr=...), cls its class",
        "lr_scheduler": 'a rate is a function of the timestamp: adamw(lr=pl.schedules.cosine("3ep", peak=3e-4))',
    },
    "pure_loop.schedules": {
        "CosineAnnealingLR cosine_annealing cosine_decay": 'write cosine("3ep", peak=3e-4)',
        "StepLR": 'write step("10ep", gamma=0.1)',
        "MultiStepLR": 'write multistep(["10ep", "20ep"])',
        "OneCycleLR": 'write one_cycle("3ep", peak=3e-4)',
        "CyclicLR": 'write cyclic("2ep", 1e-4, 1e-3)',
        "CosineAnnealingWarmRestarts": 'write cosine_restarts("3ep")',
        "PolynomialLR": 'write polynomial("3ep", power=1.0)',
        "ConstantLR": "write constant(1e-3)",
        "SequentialLR ChainedScheduler": "write chain(first, (time, next)), or product([...])",
        "LambdaLR": "any function of the timestamp serves: lr=lambda timestamp: 1e-3 * 0.99**timestamp.epoch",
        "LinearWarmup get_linear_schedule_with_warmup": 'write warmup("100ba", linear(1e-3, 0.0, "3ep"))',
        "get_cosine_schedule_with_warmup": 'write cosine("3ep", peak=3e-4, warmup="100ba")',
        "ExponentialLR": 'write exponential("1ep", gamma=0.9)',
        "LinearLR": 'write linear(1.0, 0.0, "3ep")',
        "ReduceLROnPlateau": 'a schedule knows no metric: pl.algorithms.reduce_on_plateau("val/loss")',
    },
}


def hint(package: str, name: str) -> str | None:
    """What to write instead of a name; None where nothing is known of it."""
    for names, text in _HINTS.get(package, {}).items():
        if name in names.split():
            return text
    return None
