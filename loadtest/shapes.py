"""Locust's load shape for the scenarios. Apart from them because importing Locust patches the whole process."""

from pathlib import Path

from locust import LoadTestShape, User
from scenarios import SCENARIOS


class ScenarioShape(LoadTestShape):
    """Drives the scenario that --scenario names; --users is its peak, --run-time its duration (see --until)."""

    use_common_options = True  # the options keep their meaning instead of being refused

    def tick(self) -> tuple[int, float, list[type[User]] | None] | None:
        """Users wanted now, and how many to start per second; None at the end."""
        assert self.runner is not None
        options = self.runner.environment.parsed_options
        scenario = SCENARIOS[options.scenario]
        duration = options.run_time or scenario.seconds
        moment = self.get_run_time() / duration
        if moment >= 1 and not (options.until and not Path(options.until).exists()):
            return None
        users = max(1, round(scenario.users(min(moment, 0.999)) * (options.num_users or 1)))
        return users, max(1.0, users / min(2.0, 0.1 * duration)), None
