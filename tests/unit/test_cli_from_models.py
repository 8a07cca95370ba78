"""Options made from a model's fields: their names, types, defaults, help, and what a command is given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import click
import pytest
from click.testing import CliRunner
from pydantic import BaseModel, Field, model_validator

from costcache.cli.from_models import model_options
from costcache.errors import SettingsError


class Kitchen(BaseModel):
    """A model with a field of each kind."""

    chairs: int = Field(4, ge=1, lt=100, description="Chairs at the table.")
    heat: Annotated[float, Field(gt=0)] = 0.5
    cook: str = Field(description="Who cooks.")
    style: Literal["thai", "greek"] = "greek"
    guests: tuple[str, ...] = ("ann",)
    recipe: Path | None = None
    seed: int | None = Field(None, description="Seed.  [default: the day]")
    vegan: bool = False
    music: bool = Field(True, description="Play music.")

    @model_validator(mode="after")
    def _seats(self) -> Kitchen:
        if len(self.guests) > self.chairs:
            raise ValueError(f"There are {len(self.guests)} guests for {self.chairs} chairs")
        return self


def command(*fields: str, **given: Any) -> click.Command:
    @click.command()
    @click.option("--loud", is_flag=True)
    @model_options(Kitchen, "kitchen", *fields, **given)
    def dinner(kitchen: Kitchen, loud: bool) -> None:
        click.echo(f"{kitchen!r} {loud}")

    return dinner


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(command(), arguments)


def test_a_command_is_given_an_instance() -> None:
    assert invoke("--cook", "bo").output == f"{Kitchen(cook='bo')!r} False\n"
    line = [
        "--cook=bo",
        "--chairs=7",
        "--heat=2",
        "--style=thai",
        "--guests=a",
        "--guests=b",
        "--recipe=r.md",
    ]
    found = invoke(*line, "--seed=3", "--vegan", "--no-music", "--loud").output
    expected = Kitchen(
        cook="bo",
        chairs=7,
        heat=2.0,
        style="thai",
        guests=("a", "b"),
        recipe=Path("r.md"),
        seed=3,
        vegan=True,
        music=False,
    )
    assert found == f"{expected!r} True\n"


def test_the_help_tells_defaults_bounds_and_choices() -> None:
    shown = " ".join(invoke("--help").output.split())
    for part in (
        "--chairs INTEGER Chairs at the table. [default: 4; 1<=x<100]",
        "--heat FLOAT [default: 0.5; x>0]",
        "--cook TEXT Who cooks. [required]",
        "--style [thai|greek] [default: greek]",
        "--guests TEXT [default: ann]",
        "--recipe PATH",
        "--seed INTEGER Seed. [default: the day]",
        "--music / --no-music Play music. [default: music]",
    ):
        assert part in shown
    assert "--no-vegan" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--chairs", "0"), "--chairs is 0: input should be greater than or equal to 1"),
        (("--heat", "nan"), "--heat is nan: input should be greater than 0"),
        (
            ("--chairs", "0", "--heat", "0"),
            "--chairs is 0: input should be greater than or equal to 1; --heat",
        ),
        (("--chairs", "1", *("--guests=a", "--guests=b")), "there are 2 guests for 1 chairs"),
    ],
)
def test_the_model_refuses_and_the_error_names_the_option(arguments: tuple[str, ...], message: str) -> None:
    error = invoke("--cook", "bo", *arguments).exception
    assert isinstance(error, SettingsError)
    assert str(error).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--chairs", "x"), "Invalid value for '--chairs': 'x' is not a valid integer."),
        (("--heat", "x"), "Invalid value for '--heat': 'x' is not a valid float."),
        (("--style", "x"), "Invalid value for '--style': 'x' is not one of 'thai', 'greek'."),
        ((), "Missing option '--cook'."),
    ],
)
def test_text_that_is_not_a_value_is_a_usage_error(arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*(("--cook", "bo") if arguments else ()), *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_fields_are_chosen_and_renamed() -> None:
    some = command("seed", "cook", cook={"flag": "--chef", "metavar": "NAME"})
    assert [option.name for option in some.params] == ["loud", "seed", "cook"]
    runner = CliRunner()
    assert "--chef NAME" in runner.invoke(some, ["--help"]).output
    assert runner.invoke(some, ["--chef", "bo"]).output == f"{Kitchen(cook='bo')!r} False\n"


def test_a_prefix_says_when_options_matter() -> None:
    @click.command()
    @model_options(Kitchen, "kitchen", "chairs", "cook", prefix="At dinner, ")
    def dinner(kitchen: Kitchen) -> None:
        """Eat."""

    shown = " ".join(CliRunner().invoke(dinner, ["--help"]).output.split())
    assert "At dinner, chairs at the table." in shown
    assert "At dinner, who cooks." in shown
