"""Saving, loading and copying an optimizer: ``state_dict``, ``deepcopy`` and ``pickle``."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quasidiag import validate
from quasidiag.auto import rest
from quasidiag.auto.report import Report
from quasidiag.auto.stacks import Stacks
from quasidiag.collect import Collector

#: The version of the format of ``state_dict()``.
VERSION = 1
#: The parts of a parameter's state that survive a change of its block: momentum and averaging, but not the metric.
STAYS = ("momentum", *rest.KEPT)


class Saved(Optimizer):
    """The part of the optimizer that saves and loads it.

    A copy keeps the attributes without a leading underscore; :meth:`_attach` makes the others anew.
    """

    steps: int
    auto: Report | None
    _collector: Collector
    _group: dict[Any, dict[str, Any]]

    @abstractmethod
    def _attach(self) -> None:
        """Watch the model, using the attributes that a copy keeps."""

    @abstractmethod
    def _count(self, steps: int) -> None:
        """Set the number of steps taken so far."""

    @abstractmethod
    def name_of(self, parameter: Tensor) -> str:
        """The name of a parameter in the model."""

    @abstractmethod
    def _restart(self) -> None:
        """Drop what backward passes have accumulated since the last step."""

    def state_dict(self) -> dict[str, Any]:
        """As in ``torch.optim``, with the number of steps, the report of ``step="auto"`` and the Monte Carlo generator."""
        generator, saved = self._collector.generator, super().state_dict()
        if self.auto is not None:  # torch.distributed.checkpoint saves nothing but state and groups
            saved["param_groups"][0]["report"] = self.auto.written()
        return {
            **saved,
            "version": VERSION,
            "steps": self.steps,
            "auto": None if self.auto is None else asdict(self.auto),
            "generator": None if generator is None else generator.get_state(),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in ``torch.optim``; the metric keeps its own precision whatever the parameters' is."""
        validate.loadable(state_dict, VERSION, self.auto is not None)
        validate.fits(state_dict, self._group, self.name_of)
        plain = {key: state_dict[key] for key in ("state", "param_groups")}
        super().load_state_dict(plain)
        parameters = [p for group in self.param_groups for p in group["params"]]
        indices = [i for group in state_dict["param_groups"] for i in group["params"]]
        for parameter, index in zip(parameters, indices):
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][key] = value.to(parameter.device, copy=True)
        report = state_dict.get("auto") or Report.read(self.param_groups[0].get("report"))
        if self.auto is not None and report:
            vars(self.auto).update({**asdict(Report()), **report})
        self._count(state_dict.get("steps", self.param_groups[0].get("steps", 0)))
        self._group = {p: group for group in self.param_groups for p in group["params"]}
        self._stacks = Stacks()  # which layers are alike depends on their state
        rest.loaded_(self.state.values())
        self._restart()
        if state_dict.get("generator") is not None:
            self._collector.set_generator(state_dict["generator"], parameters[0].device)

    def __getstate__(self) -> dict[str, Any]:
        """For ``deepcopy`` and ``pickle``: everything but the hooks, which :meth:`__setstate__` attaches again."""
        generator = self._collector.generator
        public = {k: v for k, v in self.__dict__.items() if k[0] != "_" and k != "step"}
        place = None if generator is None else (generator.get_state(), str(generator.device))
        return {**public, "generator": place}

    def __setstate__(self, state: dict[str, Any]) -> None:
        place = state.pop("generator", None)
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        if "model" in state:  # not when torch's load_state_dict calls this
            rest.loaded_(self.state.values())
            self._attach()
            if place is not None:
                self._collector.set_generator(*place)
