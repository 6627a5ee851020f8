"""HTML pages of an endpoint: the start page, and the description of its API.

The description is generated from the OpenAPI document of the endpoint.

Each page is one file of HTML and CSS. Names of models and tensors can be any text, so the
template escapes every value.
"""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from onnx_ops.printable import show_controls
from onnx_ops.protocol.images import SAMPLE_IMAGE
from onnx_ops.serving.http.openapi import build_openapi
from onnx_ops.serving.inference.image_tensors import IMAGE_DTYPE
from onnx_ops.serving.inference.responses import RawResponse, RequestHead
from onnx_ops.serving.inference.signature import ModelSignature
from onnx_ops.serving.inference.tensors import DATATYPE_OF, describe_tensor
from onnx_ops.serving.metrics import OTHER_STATUS, STATUSES, get_column

if TYPE_CHECKING:
    from jinja2 import Template

    from onnx_ops.serving.inference.deployments import LoadedDeployment, TableSnapshot

_PAGE_LINES = (
    b"content-type: text/html; charset=utf-8\r\n"
    b"content-security-policy: default-src 'none'; style-src 'unsafe-inline'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
    b"x-content-type-options: nosniff\r\n"
    b"referrer-policy: no-referrer\r\n"
)
_HOST = re.compile(rb"(?:[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{1,45}\])(?::[0-9]{1,5})?")
_DEFAULT_HOST = b"127.0.0.1:8080"
_MAX_EXAMPLE_VALUES = 64
_EXAMPLES: Mapping[str, object] = {
    "string": "text",
    "bool": False,
    IMAGE_DTYPE: b64encode(SAMPLE_IMAGE).decode(),
}
"""Values of elements in an example that are not numbers, by `TensorSpec.dtype`."""

_TEMPLATE = """\
{% macro show(schema) -%}
{% if "$ref" in schema %}{% set name = schema["$ref"].rpartition("/")[2] -%}
<a href="#schema-{{ name }}">{{ name }}</a>
{%- else %}<code>{{ schema | dump }}</code>{% endif %}
{%- endmacro %}
{% macro show_content(content) -%}
{% for type, body in content.items() %}<div>{{ type }}{% if body.schema %}: {{ show(body.schema) }}{% endif %}</div>
{% endfor %}
{%- endmacro %}
{% macro list_tensors(tensors) -%}
<div class="scroll"><table><thead><tr><th>name<th>datatype<th>shape</thead><tbody>
{% for tensor in tensors %}
<tr><td><code>{{ tensor.name }}</code><td>{{ tensor.datatype }}<td><code>{{ tensor.shape }}</code>
{%- if tensor.parameters %}, optional{% endif %}

{% endfor %}
</tbody></table></div>
{%- endmacro %}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root{color-scheme:light dark;--rule:#8886;--card:#8881}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:60rem;font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.6rem}h2{font-size:1.25rem;margin-top:2.2rem}h3{font-size:1rem;margin:1rem 0 0}
h4{font-size:.9rem;margin:.8rem 0 .2rem}
code,pre{font:.85rem/1.5 ui-monospace,monospace}
pre{overflow-x:auto;padding:.8rem;background:var(--card);border-radius:.4rem;overflow-wrap:normal}
section{border:1px solid var(--rule);border-radius:.4rem;padding:.8rem;margin:.8rem 0}
th,td:first-child{white-space:nowrap}section h3{margin:0}section pre{margin:.4rem 0 0}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{padding:.3rem .5rem .3rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule)}
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p>onnx-ops {{ version }}
<ul>
{% for path, label in links %}
<li><a href="{{ path }}">{{ label }}</a>
{% endfor %}
</ul>
{% if served %}
<h2>Traffic</h2>
<p>{{ rollout }} Generation {{ generation }} of the routing table, loaded by this worker at {{ since }}. Counts
are those of this server since it started.</p>
<div class="scroll"><table><thead><tr><th>version<th>variant<th>share<th>requests<th>errors<th>rejected<th>state</thead>
<tbody>
{% for row in served %}
<tr><td><code>{{ row.version }}</code><td>{{ row.variant }}<td>{{ row.share }}<td>{{ row.requests }}<td>{{ row.errors }}
<td>{{ row.rejected }}<td>{{ row.state }}
{% endfor %}
</tbody></table></div>
<p>Errors are answers of the statuses 500 to 599; rejected requests have the statuses 400 to 499.</p>
{% endif %}
{% if document %}
<h2>Call the model</h2>
{% if command %}
<pre>{{ command }}</pre>
{% else %}
<p>An input is BF16, which JSON cannot represent. Send it in the binary form.</p>
{% endif %}
{% if request %}
<p>Write <code>request.json</code> first; put your values in place of those in <code>data</code>:</p>
<pre>{{ request }}</pre>
{% endif %}
<p>A request can leave out optional inputs. -1 is a dimension of any size.</p>
<h3>Inputs</h3>
{{ list_tensors(inputs) }}
<h3>Outputs</h3>
{{ list_tensors(outputs) }}
<h2>Operations</h2>
{% for path, item in document.paths.items() %}
{% for method, operation in item.items() if method != "parameters" %}
<section>
<h3><code>{{ method | upper }} {{ path }}</code></h3>
<p>{{ operation.summary }}</p>
{% set parameters = item.get("parameters", []) + operation.get("parameters", []) %}
{% if parameters %}
<h4>Parameters</h4>
<div class="scroll"><table><thead><tr><th>name<th>in<th>values<th>meaning</thead><tbody>
{% for parameter in parameters %}
<tr><td><code>{{ parameter.name }}</code><td>{{ parameter.in }}<td>{{ show(parameter.schema) }}
<td>{{ parameter.description }}
{% endfor %}
</tbody></table></div>
{% endif %}
{% if operation.requestBody %}
<h4>Request body</h4>
{% if operation.requestBody.description %}<p>{{ operation.requestBody.description }}</p>{% endif %}
{{ show_content(operation.requestBody.content) }}
{% endif %}
<h4>Responses</h4>
<div class="scroll"><table><thead><tr><th>status<th>meaning<th>body</thead><tbody>
{% for status, response in operation.responses.items() %}
{% set response = document.components.responses[status] if "$ref" in response else response %}
<tr><td>{{ status }}<td>{{ response.description }}<td>{{ show_content(response.content) }}
{% endfor %}
</tbody></table></div>
</section>
{% endfor %}
{% endfor %}
<h2>Schemas</h2>
{% for name, schema in document.components.schemas.items() %}
<section id="schema-{{ name }}"><h3>{{ name }}</h3><pre>{{ schema | pretty }}</pre></section>
{% endfor %}
{% endif %}
</body>
</html>
"""  # noqa: E501


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVersion:
    """Row of the start page: a version in the routing table and its request counts."""

    version: str
    variant: str
    share: str
    requests: int = 0
    errors: int = 0
    rejected: int = 0
    state: str = "ready"


def list_served(
    snapshot: TableSnapshot, read_counts: Callable[[int], Sequence[int]], out_of_service: int = 0
) -> list[ServedVersion]:
    """Return the versions of a routing table, the one with the most traffic first.

    Args:
        read_counts: returns the counters of a slot of the shared metrics, by column.
        out_of_service: bit mask of the slots that get no requests.
    """
    split, served = snapshot.table.state.split, []
    by_weight = sorted(
        snapshot.table.state.deployments, key=lambda d: -split.weights.get(d.name, 0)
    )
    for deployment in by_weight:
        loaded = snapshot.deployments.get(deployment.name)
        counts = None if loaded is None else read_counts(loaded.slot)
        shadow = split.shadow.get(deployment.name, 0)
        share = f"{split.weights.get(deployment.name, 0)} %" + (
            f", {shadow} % mirrored" if shadow else ""
        )
        served.append(
            ServedVersion(
                version=deployment.version,
                variant=deployment.variant,
                share=share,
                requests=0 if counts is None else sum(counts[: OTHER_STATUS + 1]),
                errors=0 if counts is None else _count_statuses(counts, 500),
                rejected=0 if counts is None else _count_statuses(counts, 400),
                state=_describe_state(
                    loaded, snapshot.failed.get(deployment.name, ""), out_of_service
                ),
            )
        )
    return served


def _describe_state(loaded: LoadedDeployment | None, failure: str, out_of_service: int) -> str:
    if loaded is None:
        return f"not loaded: {failure}"
    if out_of_service >> loaded.slot & 1:
        return "out of service: workers crashed or hung while they ran it"
    return "ready"


def _count_statuses(counts: Sequence[int], first: int) -> int:
    """Return the number of responses with a status from `first` to `first` + 99.

    Only the statuses in `STATUSES` are included.
    """
    return sum(counts[get_column(status)] for status in STATUSES if first <= status < first + 100)


def _describe_rollout(snapshot: TableSnapshot) -> str:
    """Return a description of the rollout's step, derived from the traffic shares.

    Only the ledger contains the number and the verdict of the step.
    """
    newest, _ = snapshot.table.get_experiment()
    share = snapshot.table.state.split.weights.get(newest, 0)
    version = next(d.version for d in snapshot.table.state.deployments if d.name == newest)
    if share == 100:
        return f"Version {version} has all traffic."
    return f"A rollout is at {share} %: version {version} has {share} % of the traffic."


def build_start_page(
    snapshot: TableSnapshot | None, served: Sequence[ServedVersion] = ()
) -> RawResponse:
    """Return the HTML of the start page: the served versions, and links.

    `snapshot` is None before the first publication.
    """
    model = None if snapshot is None else snapshot.model
    links = [
        ("v2/health/ready", "Readiness"),
        ("metrics", "Metrics"),
        ("v2", "Metadata of the server"),
        *(() if model is None else ((f"v2/models/{quote(model, safe='')}", f"Model {model}"),)),
        ("docs", "Description of the API"),
        ("openapi.json", "OpenAPI document"),
    ]
    if snapshot is None:
        return _render(title="Nothing is published yet", links=links)
    since = datetime.fromtimestamp(snapshot.loaded_at, UTC)
    return _render(
        title=f"Endpoint of {model}",
        links=links,
        served=served,
        rollout=_describe_rollout(snapshot),
        generation=snapshot.table.state.generation,
        since=f"{since:%Y-%m-%d %H:%M:%S} UTC",
    )


def build_docs_page(signatures: Sequence[ModelSignature], head: RequestHead) -> RawResponse:
    """Return the API description with a sample call of the first signature."""
    document, signature = build_openapi(signatures), signatures[0]
    command, request = build_example(signature, head.get(b"host", _DEFAULT_HOST))
    return _render(
        title=document["info"]["title"],
        links=[("./", "Start page"), ("openapi.json", "OpenAPI document")],
        document=document,
        command=command,
        request=request,
        inputs=[
            describe_tensor(spec, optional=name in signature.optional)
            for name, spec in signature.inputs.items()
        ],
        outputs=[describe_tensor(spec) for spec in signature.outputs.values()],
    )


def build_example(signature: ModelSignature, host: bytes) -> tuple[str, str]:
    """Return a curl command that calls the model, and a command for its input file.

    For large inputs, the curl command sends a file that the second command writes. For small
    inputs, the second command is empty. Both commands are empty if JSON cannot represent a required
    input.
    """
    specs = [spec for name, spec in signature.inputs.items() if name in signature.required]
    if any(spec.dtype == "bfloat16" for spec in specs):
        return "", ""
    shapes = [[d if isinstance(d, int) else 1 for d in spec.shape] for spec in specs]
    is_large = sum(map(math.prod, shapes)) > _MAX_EXAMPLE_VALUES
    inputs = []
    for spec, shape in zip(specs, shapes, strict=True):
        value = _EXAMPLES.get(spec.dtype, 0)
        data = [value] if is_large else [value] * math.prod(shape)
        inputs.append(
            {"name": spec.name, "datatype": DATATYPE_OF[spec.dtype], "shape": shape, "data": data}
        )
    document: dict[str, Any] = {"inputs": inputs}
    if signature.binary_only:
        document["parameters"] = {"binary_data_output": True}
    place = host if _HOST.fullmatch(host) else _DEFAULT_HOST
    url = f"http://{place.decode()}/v2/models/{quote(signature.model, safe='')}/infer"
    body = "@request.json" if is_large else json.dumps(document)
    options = ["--header 'Content-Type: application/json'", f"--data {shlex.quote(body)}"]
    if signature.binary_only:
        options.append("--output response.bin")
    command = " \\\n  ".join((f"curl {shlex.quote(url)}", *options))
    return command, _write_request(document) if is_large else ""


def _write_request(document: Mapping[str, Any]) -> str:
    """Return a command that writes a request.

    In `document`, each input has one value. The command repeats this value to fill the shape of the
    input.
    """
    code = f"import json; r = {dict(document)!a}\n"
    code += (
        "for t in r['inputs']: "
        "t['data'] *= __import__('math').prod(t['shape'])\nprint(json.dumps(r))"
    )
    return f"python3 -c {shlex.quote(code)} > request.json"


def _render(**values: Any) -> RawResponse:
    defaults: Mapping[str, object] = {
        "document": None,
        "served": (),
        "version": version("onnx-ops"),
    }
    page = show_controls(_load_template().render({**defaults, **values}))
    return RawResponse(200, _PAGE_LINES, page.encode())


@functools.cache
def _load_template() -> Template:
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "dump": functools.partial(json.dumps, ensure_ascii=False),
        "pretty": _format_json,
    }
    return environment.from_string(_TEMPLATE)


def _format_json(document: object) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False)
