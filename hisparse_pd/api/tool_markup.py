"""How families of models write tool calls: the marks, by which ``call_reader`` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hisparse_pd.api.chat_format import DSML, V31, ToolMarkup


@dataclass(frozen=True)
class Markup:
    """Calls stand between one of ``openings`` and ``closing``; each begins with ``call`` and ends with
    ``call_end``. A call is a name and, behind ``end_of_name``, its arguments: keys and values, each with
    marks of its own, or one JSON object.

    ``call``, ``end_of_name``, ``value``: "" where no mark stands there. ``key``: "" where arguments are JSON.
    ``values_hide_marks``: within a value nothing but its end is a mark; otherwise a call can end there.
    ``says_type``: behind the key stands whether the value is a string; otherwise the tool's schema says so.
    ``takes_repeated_keys``: otherwise a key that comes twice is a fault.
    ``ends_reasoning``: a model may call without having closed its reasoning.
    ``sign``: what of an opening can be nothing but markup.
    """

    openings: tuple[str, ...]
    closing: str
    call: str
    end_of_name: str
    call_end: str
    sign: str
    key: str = ""
    end_of_key: str = ""
    value: str = ""
    end_of_value: str = ""
    values_hide_marks: bool = False
    says_type: bool = False
    takes_repeated_keys: bool = False
    ends_reasoning: bool = False

    @property
    def ends(self) -> tuple[str, ...]:
        """What a call ends with, whether it is complete or not."""
        return tuple(dict.fromkeys((self.call_end, self.closing)))


STRING_ATTRIBUTE = '" string="'
"""Between a key and whether its value is a string, in DeepSeek-V3.2's calls."""

MARKUPS: Final[Mapping[ToolMarkup, Markup]] = {
    # name<arg_key>key</arg_key><arg_value>value</arg_value>..., with line breaks between or without.
    ToolMarkup.GLM: Markup(
        openings=("<tool_call>",),
        closing="</tool_call>",
        call="",
        end_of_name="",
        call_end="</tool_call>",
        sign="<tool_call>",
        key="<arg_key>",
        end_of_key="</arg_key>",
        value="<arg_value>",
        end_of_value="</arg_value>",
        takes_repeated_keys=True,
        ends_reasoning=True,
    ),
    # <invoke name="..."><parameter name="..." string="true|false">value</parameter>..., with prefixes.
    ToolMarkup.DSML: Markup(
        openings=(f"\n\n<{DSML}function_calls>", f"<{DSML}function_calls>"),  # the empty line belongs to it
        closing=f"</{DSML}function_calls>",
        call=f'<{DSML}invoke name="',
        end_of_name='">',
        call_end=f"</{DSML}invoke>",
        sign=DSML,
        key=f'<{DSML}parameter name="',
        end_of_key='">',
        end_of_value=f"</{DSML}parameter>",
        values_hide_marks=True,
        says_type=True,
    ),
    # <begin>name<sep>{...}<end>: the arguments are a JSON object as it stands.
    ToolMarkup.DEEPSEEK_V31: Markup(
        openings=(V31.CALLS,),
        closing=V31.END_OF_CALLS,
        call=V31.CALL,
        end_of_name=V31.SEPARATOR,
        call_end=V31.END_OF_CALL,
        sign=V31.CALLS,
    ),
}
