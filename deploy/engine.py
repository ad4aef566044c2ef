"""The commands of a container engine that `make compose-check` uses."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILES = ("compose.yaml", "deploy/compose-check.yaml")


class EngineError(Exception):
    """A command of the engine failed, or no engine answers."""


class Compose:
    """A project of `docker compose` with its own ports."""

    def __init__(self, command: tuple[str, ...], project: str, settings: Mapping[str, str]) -> None:
        files = [word for name in FILES for word in ("--file", name)]
        self._command = [*command, "--project-name", project, *files]
        self._environment = os.environ | dict(settings)

    @classmethod
    def find(cls, project: str, settings: Mapping[str, str]) -> "Compose":
        """Finds the engine's compose command. Raises EngineError if no engine answers or it has no compose."""
        if shutil.which("docker") is None:
            raise EngineError("there is no docker command")
        docker("version", "--format", "{{.Server.Version}}")
        for command in (("docker", "compose"), ("docker-compose",)):
            if shutil.which(command[0]) and subprocess.run([*command, "version"], capture_output=True).returncode == 0:
                return cls(command, project, settings)
        raise EngineError("the engine answers, but there is no docker compose")

    def run(self, *words: str) -> None:
        """Runs a compose command and shows its output. Raises EngineError."""
        print("+ compose", *words, flush=True)
        done = subprocess.run([*self._command, *words], cwd=ROOT, env=self._environment, stdout=sys.stderr, check=False)
        if done.returncode != 0:
            raise EngineError(f"compose {' '.join(words)}: exit code {done.returncode}")

    def container(self, service: str) -> "Container":
        """Returns the container of a service, running or not. Raises EngineError if there is none."""
        words = [*self._command, "ps", "--quiet", service]
        done = subprocess.run(words, cwd=ROOT, env=self._environment, text=True, capture_output=True, check=False)
        if not done.stdout.strip():
            raise EngineError(f"{service} has no container")
        return Container(done.stdout.split()[0])


class Container:
    """A container, identified by its id."""

    def __init__(self, container_id: str) -> None:
        self.id = container_id

    def details(self) -> dict[str, Any]:
        """Returns the output of `docker inspect`."""
        (found,) = json.loads(docker("inspect", self.id))
        return dict(found)

    @property
    def health(self) -> str:
        """The health status: "starting", "healthy", "unhealthy", or "none" without a health check."""
        return str(self.details()["State"].get("Health", {}).get("Status", "none"))

    @property
    def is_running(self) -> bool:
        return bool(self.details()["State"]["Running"])

    @property
    def num_restarts(self) -> int:
        """The number of restarts by the restart policy."""
        return int(self.details()["RestartCount"])

    @property
    def exit_code(self) -> int:
        return int(self.details()["State"]["ExitCode"])


def found_base_image() -> str:
    """Returns the image that both services are built on; pulls it if necessary. Raises EngineError."""
    lines = (ROOT / ".env").read_text(encoding="utf-8").splitlines()
    defaults = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    image = os.environ.get("BASE_IMAGE", defaults["BASE_IMAGE"])
    try:
        docker("image", "inspect", image)
    except EngineError:
        docker("pull", "--quiet", image)
    return image


def docker(*words: str) -> str:
    """Runs a docker command and returns its output. Raises EngineError."""
    done = subprocess.run(["docker", *words], text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise EngineError(f"docker {' '.join(words)}: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
    return done.stdout.strip()
