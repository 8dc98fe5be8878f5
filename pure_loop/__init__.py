"""pure_loop: the training loop as a generator of ``(Event, State)`` pairs over immutable States."""

from pure_loop import gradients, metrics, optim, order, random, schedules, stages
from pure_loop.algorithm import Algorithm, algorithm, compose
from pure_loop.cadence import every
from pure_loop.callback import Callback, Logger
from pure_loop.errors import *  # noqa: F403
from pure_loop.evaluator import Evaluator
from pure_loop.event import Event
from pure_loop.fit import drive, evaluate, fit, predict, run
from pure_loop.frozendict import FrozenDict
from pure_loop.state import State
from pure_loop.task import Task
from pure_loop.time import Time, Timestamp, TimeUnit
