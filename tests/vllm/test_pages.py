"""The servers' commands that the pages show: vLLM's command line takes them, and costcache their settings."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from costcache.vllm import build
from tests.docs.commands import Command, commands


@pytest.mark.parametrize("command", commands("vllm"), ids=str)
def test_the_command_line_takes_it(command: Command) -> None:
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([*command.words[2:]])
    assert command.words[1] == "serve"
    assert "MODEL" in command.words
    given = args.additional_config
    assert build.read_config(SimpleNamespace(additional_config=given)) is not None or args.kv_transfer_config
