"""The fields of a body about tools, in the forms of the three APIs, as a `ToolUse`."""

from collections.abc import Collection, Sequence

from gateway.api.fields import Fields, shown
from gateway.tools.tool_use import Tool, ToolUse

MAX_TOOLS = 128

UNWRITABLE_NAMES = (
    "must have different names of letters, digits, _, - and . if they are forced, strict, allowed by name, without "
    "parallel calls or beside a response format"
)


def chat_tool_use(
    fields: Fields, tools: Sequence[Tool], needing_tools: Collection[str] = ("auto", "required")
) -> ToolUse | None:
    """Reads `tool_choice` and `parallel_tool_calls` of OpenAI's APIs. Returns None without tools.

    needing_tools  choices that are refused without tools
    """
    several = fields.flag("parallel_tool_calls", default=True)
    choice = fields.get("tool_choice")
    if isinstance(choice, dict):
        named = Fields(choice, f"{fields.path}tool_choice.", fields.problems)
        if named.get("type") == "allowed_tools":
            return _allowed_use(named, tools, several)
        return _named_use(named, tools)
    if choice not in (None, "none", "auto", "required"):
        fields.add_problem("tool_choice", f"must be none, auto, required or a tool, not {shown(choice)}")
    elif choice in needing_tools and not tools:
        fields.add_problem("tool_choice", "is allowed only with tools")
    use = ToolUse(tuple(tools), choice != "none", choice == "required", None, several)
    return _checked(fields, use) if tools else None


def _named_use(choice: Fields, tools: Sequence[Tool]) -> ToolUse | None:
    """Reads a choice of one tool: within `function` in chat completions, at the top in responses."""
    choice.check_names({"type", "name", "function"})
    if choice.get("type") != "function":
        choice.add_problem("type", f'must be "function" or "allowed_tools", not {shown(choice.get("type"))}')
        return None
    holder = choice.nested("function") if "function" in choice else choice
    if holder is None:
        return None
    if holder is not choice:
        holder.check_names({"name"})
    return _forced(choice, holder, tools)


def _allowed_use(choice: Fields, tools: Sequence[Tool], several: bool) -> ToolUse | None:
    """Reads a choice of several tools: within `allowed_tools` in chat completions, at the top in responses."""
    choice.check_names({"type", "mode", "tools", "allowed_tools"})
    holder = choice.nested("allowed_tools") if "allowed_tools" in choice else choice
    if holder is None:
        return None
    if holder is not choice:
        choice.check_names({"type", "allowed_tools"})
        holder.check_names({"mode", "tools"})
    mode = holder.get("mode")
    if mode not in ("auto", "required"):
        holder.add_problem("mode", f"must be auto or required, not {shown(mode)}")
    given = holder.few_items("tools", MAX_TOOLS)
    if not given:
        holder.add_problem("tools", "must have at least one tool")
    known = {tool.name for tool in tools}
    names = [
        _allowed_name(Fields(value, f"{holder.path}tools[{i}].", holder.problems), known)
        for i, value in enumerate(given)
    ]
    use = ToolUse(tuple(tools), True, mode == "required", frozenset(names), several)
    return _checked(choice, use) if tools else None


def _allowed_name(tool: Fields, known: Collection[str]) -> str:
    """Returns the name of one of the tools: within `function` in chat completions, at the top in responses."""
    tool.check_names({"type", "name", "function"})
    if tool.get("type") != "function":
        tool.add_problem("type", f'must be "function", not {shown(tool.get("type"))}')
        return ""
    holder = tool.nested("function") if "function" in tool else tool
    if holder is None:
        return ""
    if holder is not tool:
        holder.check_names({"name"})
    return _known_name(holder, known)


def _known_name(holder: Fields, known: Collection[str]) -> str:
    """Returns the field `name`, which must be that of a tool."""
    name = holder.required("name")
    if name and name not in known:
        holder.add_problem("name", f"is none of the tools: {shown(name)}")
    return name


def _forced(fields: Fields, holder: Fields, tools: Sequence[Tool]) -> ToolUse | None:
    """Returns the use of one tool, which the field `name` names."""
    name = _known_name(holder, {tool.name for tool in tools})
    use = ToolUse(tuple(tools), is_forced=True, allowed=frozenset({name}), allows_several=False)
    return _checked(fields, use)


def anthropic_tool_use(fields: Fields, tools: Sequence[Tool]) -> ToolUse | None:
    """Reads Anthropic's `tool_choice`. Returns None without tools."""
    choice = fields.nested("tool_choice")
    if choice is None:
        return ToolUse(tuple(tools)) if tools else None
    choice.check_names({"type", "name", "disable_parallel_tool_use"})
    several = not choice.flag("disable_parallel_tool_use")
    kind = choice.get("type")
    if kind not in ("auto", "any", "tool", "none"):
        choice.add_problem("type", f"must be auto, any, tool or none, not {shown(kind)}")
    elif kind in ("any", "tool") and not tools:
        choice.add_problem("type", "is allowed only with tools")
    elif kind == "tool":
        return _forced(fields, choice, tools)
    use = ToolUse(tuple(tools), kind != "none", kind == "any", None, several)
    return _checked(fields, use) if tools else None


def _checked(fields: Fields, use: ToolUse) -> ToolUse:
    """Adds a problem if a grammar could not write the name of a tool, or could not tell two tools apart."""
    if use.needs_grammar and not use.has_writable_names:
        fields.add_problem("tools", UNWRITABLE_NAMES)
    return use
