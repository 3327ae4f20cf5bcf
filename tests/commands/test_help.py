"""The help tells of every setting."""

import re

from lacuna.commands.arguments import help_text
from lacuna.config import Config


def test_every_setting_and_section_has_its_help():
    for section, info in Config.model_fields.items():
        table = help_text(999).split(f"\n[{section}]  ")[1].partition("\n[")[0]
        heading, *settings = table.split("\n  --")
        told = {f"--{words.split()[0]}": words.partition("\n")[2].strip() for words in settings}
        assert told.keys() == {f"--{section}.{name}" for name in info.annotation.model_fields}
        assert heading.endswith(".") and all(len(text) > 15 and text[0].isupper() for text in told.values()), told


def test_the_docstring_of_a_section_tells_of_its_settings_and_no_others():
    for info in Config.model_fields.values():
        told = re.findall(r"^    (\w+): ", info.annotation.__doc__, re.MULTILINE)
        assert told == list(info.annotation.model_fields)


def test_help_is_plain_lines_that_fit(capsys):
    assert max(map(len, help_text(80).splitlines())) <= 100
    assert "(default: 8)" in help_text() and "linear|sqrt|cosine|constant" in help_text()
