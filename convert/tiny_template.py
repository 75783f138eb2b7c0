"""The demo checkpoint's chat template: the turns and modes of M3 in our own words."""

CHAT_TEMPLATE = """\
{%- set ns_token = ']<]minimax[>[' -%}
{%- macro text_of(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content is not none -%}
    {%- for part in content -%}
      {%- if part.type in ('image', 'image_url') -%}
        {{- ']<]image[>[' -}}
      {%- elif part.type in ('video', 'video_url') -%}
        {{- ']<]video[>[' -}}
      {%- elif part.type == 'text' -%}
        {{- part.text -}}
      {%- else -%}
        {{- raise_exception('unknown content part: ' ~ part.type) -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set mode = thinking_mode | default('adaptive', true) -%}
{%- if mode not in ('enabled', 'disabled', 'adaptive') -%}
  {{- raise_exception('thinking_mode must be enabled, disabled or adaptive') -}}
{%- endif -%}
{{- ']~!b[]~b]system\\n' -}}
{{- 'This is a tiny random stand-in for MiniMax-M3.\\n\\n<thinking_instructions>\\n' -}}
{{- 'Reasoning, if any, stands between <mm:think> and </mm:think> before the answer. ' -}}
{%- if mode == 'enabled' -%}
  {{- 'Reason before every answer.' -}}
{%- elif mode == 'disabled' -%}
  {{- 'Answer without reasoning.' -}}
{%- else -%}
  {{- 'Reason when the question needs it.' -}}
{%- endif -%}
{{- '\\n</thinking_instructions>[e~[\\n' -}}
{%- set first = messages[0] if messages else none -%}
{%- set has_system = first and first.role in ('system', 'developer') -%}
{{- ']~b]developer\\n' -}}
{{- text_of(first.content) if has_system else 'You are a helpful assistant.' -}}
{%- if tools -%}
  {{- '\\n\\n# Tools\\nThese tools may be called:\\n\\n<tools>\\n' -}}
  {%- for tool in tools -%}
    {{- '<tool>' ~ ((tool.function or tool) | tojson) ~ '</tool>\\n' -}}
  {%- endfor -%}
  {{- '</tools>\\n\\nA call looks like this:\\n' ~ ns_token ~ '<tool_call>\\n' -}}
  {{- ns_token ~ '<invoke name="tool-name">' ~ ns_token ~ '<parameter-name>value' -}}
  {{- ns_token ~ '</parameter-name>' ~ ns_token ~ '</invoke>\\n' ~ ns_token ~ '</tool_call>' -}}
{%- endif -%}
{{- '[e~[\\n' -}}
{%- for message in (messages[1:] if has_system else messages) -%}
  {%- if message.role == 'user' -%}
    {{- ']~b]user\\n' ~ text_of(message.content) ~ '[e~[\\n' -}}
  {%- elif message.role == 'assistant' -%}
    {{- ']~b]ai\\n' -}}
    {%- if message.reasoning_content -%}
      {{- '<mm:think>' ~ message.reasoning_content -}}
    {%- endif -%}
    {{- '</mm:think>' ~ text_of(message.content) ~ '[e~[\\n' -}}
  {%- elif message.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}
      {{- ']~b]tool' -}}
    {%- endif -%}
    {{- '\\n<response>' ~ text_of(message.content) ~ '</response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}
      {{- '[e~[\\n' -}}
    {%- endif -%}
  {%- else -%}
    {{- raise_exception('unknown role: ' ~ message.role) -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- ']~b]ai\\n' -}}
  {%- if mode == 'enabled' -%}
    {{- '<mm:think>' -}}
  {%- elif mode == 'disabled' -%}
    {{- '</mm:think>' -}}
  {%- endif -%}
{%- endif -%}
"""
