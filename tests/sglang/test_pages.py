"""The servers' commands of the pages: SGLang's command line takes them, and costcache their settings."""

from __future__ import annotations

import argparse
import json

import pytest
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from costcache.plugins import get_plugins
from costcache.sglang.arguments import settings_of
from tests.docs.commands import Command, commands

OWN = ("loyal", "retention")
"""Policies that the reader has installed before, by the page."""


@pytest.mark.parametrize("command", commands("sglang"), ids=str)
def test_the_command_line_takes_it(command: Command) -> None:
    load_plugins()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    assert command.words[1] == "serve"
    policy = command.words[command.words.index("--radix-eviction-policy") + 1]
    own = policy.removeprefix("costcache:") in OWN and policy.startswith("costcache:")
    args = parser.parse_args(["costcache" if own and word == policy else word for word in command.words[2:]])
    if isinstance(args.radix_eviction_policy_config, str):
        args.radix_eviction_policy_config = json.loads(args.radix_eviction_policy_config)
    settings = settings_of(args)
    assert settings is not None, "costcache is not asked for"
    assert settings.policy == "costcache" or settings.policy in get_plugins().policies()
