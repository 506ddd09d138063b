"""Try policies and backends on the user's configuration, one after another. No torch here."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path

from evener.config.folders import EVENTS, check_name
from evener.config.options import BenchOptions, PretrainOptions
from evener.config.presets import resolve_config
from evener.errors import EvenerError, LaunchError
from evener.observe.comparison import Comparison, Trial, compare, read_trial, table
from evener.observe.event_lines import strict_json
from evener.observe.following import read_events
from evener.observe.numbers import human_count, human_duration
from evener.run_report.writing import report, write_page
from evener.team.child import die_with
from evener.team.terminal import say

#: Time for a trial to load models, tokenise text and start; the first one does all of it.
START_TIMEOUT_S = 3600.0
#: Time for a trial to write a checkpoint and end.
END_TIMEOUT_S = 120.0

_LOOK_S = 0.1
# Switched off, because it costs time and disk and does not depend on the policy.
_TRIAL_KEYS = ("checkpoint.every=0", "sample.num_tokens=0", "tensorboard=false")
_PRETRAIN = (sys.executable, "-P", "-m", "evener", "pretrain")


#: Runs one combination for some seconds; returns its windows, or why there are none.
RunTrial = Callable[[str, str, str, float], Trial | str]


def check_options(options: BenchOptions) -> None:
    """Resolve the configuration of every combination, before anything starts.

    Raises:
        ConfigError: A configuration, or the name of the benchmark, is invalid.
    """
    check_name(options.name)
    for policy, backend in _combinations(options):
        keys = (*options.overrides, f"policy={policy}", f"backend={backend}")
        resolve_config(PretrainOptions(config=options.config, overrides=keys, name=options.name))


def _combinations(options: BenchOptions) -> list[tuple[str, str]]:
    """Return each combination once, in the requested order."""
    return [*dict.fromkeys((p, b) for p in options.policies for b in options.backends)]


def run_bench(options: BenchOptions, run_trial: RunTrial | None = None) -> Comparison:
    """Try every combination in rounds; write ``bench.json``, ``bench.txt`` and ``bench.html``.

    Each round tries all combinations; every second round in reverse order, so that a machine that
    becomes slower favours none. Each trial starts the same training again.

    Args:
        options: What to try.
        run_trial: Called instead of starting ``evener pretrain``: (name, policy, backend, seconds).

    Returns:
        The comparison. It also has the combinations that could not run, with the reason.

    Raises:
        LaunchError: The folder cannot be created.
        KeyboardInterrupt: After Ctrl-C, once the results so far have been written.
    """
    folder = _claim(options.out, options.name)
    run_trial = run_trial or Pretrain(options, folder)
    combinations = _combinations(options)
    seconds = 60 * options.minutes / options.rounds
    trials: list[Trial] = []
    skipped: dict[str, str] = {}
    interrupted = False
    try:
        for number in range(options.rounds):
            for policy, backend in combinations[:: -1 if number % 2 else 1]:
                name = f"{policy}/{backend}"
                if name in skipped:
                    continue
                turn = f"round {number + 1} of {options.rounds}: {name}"
                say(f"{turn} for {human_duration(seconds)} ...")
                result = run_trial(f"{policy}-{backend}-{number + 1}", policy, backend, seconds)
                if isinstance(result, str):
                    skipped[name] = result
                    say(f"{turn} skipped: {result}")
                else:
                    trials.append(result)
                    say(f"{turn}: {human_count(result.speed)} {result.unit}/s")
    except KeyboardInterrupt:  # the results so far are still reported
        interrupted = True
    # A combination that failed in a later round is not compared by its first round.
    comparison = compare([t for t in trials if f"{t.policy}/{t.backend}" not in skipped], skipped)
    _write(folder, options, comparison)
    _write_page(folder, combinations, comparison)
    if interrupted:
        raise KeyboardInterrupt
    return comparison


class Pretrain:
    """Runs a trial with ``evener pretrain``, as the user would."""

    def __init__(self, options: BenchOptions, folder: Path) -> None:
        self._options = options
        self._folder = folder / "trials"
        self._folder.mkdir()
        # Text that an earlier run has tokenised is reused.
        cache = options.out.absolute() / ".cache"
        cache.mkdir(exist_ok=True)
        (self._folder / ".cache").symlink_to(cache, target_is_directory=True)

    def __call__(self, name: str, policy: str, backend: str, seconds: float) -> Trial | str:
        """Run a trial for ``seconds``; see ``RunTrial``."""
        log = self._folder / f"{name}.log"
        with log.open("wb") as output:
            parent = os.getpid()
            process = subprocess.Popen(
                self.command(name, policy, backend),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: die_with(parent),  # this process has one thread
            )
            try:
                self._wait(process, self._folder / name / EVENTS, seconds)
            finally:
                _end(process)
        return self.read(name, policy, backend, log, process.returncode)

    def command(self, name: str, policy: str, backend: str) -> list[str]:
        """Return the command of a trial; if a key is set twice, the last value counts."""
        options = self._options
        keys = (*options.overrides, *_TRIAL_KEYS, f"policy={policy}", f"backend={backend}")
        command = [*_PRETRAIN, str(options.config), "--quiet"]
        command += ["--out", str(self._folder), "--name", name]
        nproc = [] if options.nproc is None else [str(options.nproc)]
        given = {"--set": keys, "--emulate-slow": options.emulate_slow, "--nproc": nproc}
        for option, values in given.items():
            for value in values:
                command += [option, value]
        return command

    def _wait(self, process: "subprocess.Popen[bytes]", events: Path, seconds: float) -> None:
        """Return when the time of the trial is over, or it has ended by itself."""
        deadline = time.monotonic() + START_TIMEOUT_S
        started = False
        while process.poll() is None:
            if not started and events.exists() and b'"run_started"' in events.read_bytes():
                started = True
                deadline = time.monotonic() + seconds
            if time.monotonic() >= deadline:
                return
            time.sleep(_LOOK_S)

    def read(
        self, name: str, policy: str, backend: str, log: Path, code: int | None
    ) -> Trial | str:
        """Return the result; delete the trial's checkpoints, which are large."""
        run = self._folder / name
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        messages = [line.partition("error: ")[2] for line in lines if "error: " in line]
        trial = None
        if (run / EVENTS).exists():
            trial = read_trial(read_events(run / EVENTS), policy, backend)
        if (run / "checkpoints").is_dir():
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
        if code not in (0, 128 + signal.SIGTERM):
            return messages[-1] if messages else f"ended with code {code}; see {log}"
        return trial or f"no window was committed in its time; give more --minutes, or see {log}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _claim(parent: Path, name: str) -> Path:
    """Create a folder of that name and return it; a number is appended to a name in use."""
    for number in count(1):
        folder = parent.absolute() / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise LaunchError(
                f"the folder {folder} cannot be made ({error.strerror}); choose another with --out"
            ) from None
        break
    return folder


def _write(folder: Path, options: BenchOptions, comparison: Comparison) -> None:
    text = table(comparison)
    document = strict_json({**asdict(options), **asdict(comparison)})
    try:
        (folder / "bench.json").write_text(json.dumps(document, indent=1, default=str) + "\n")
        (folder / "bench.txt").write_text(text)
    except OSError as error:
        raise EvenerError(f"{folder} cannot be written: {error.strerror}") from None
    say(f"{text}written to {folder}")


def _write_page(
    folder: Path, combinations: Sequence[tuple[str, str]], comparison: Comparison
) -> None:
    """Write the page of the first round's runs side by side."""
    trials = [folder / "trials" / f"{policy}-{backend}-1" for policy, backend in combinations]
    if runs := [run for run in trials if (run / EVENTS).exists()]:
        document = {**report(runs), "bench": strict_json(comparison)}
        page = write_page(document, runs, folder / "bench.html")
        say(f"page: {page}")
