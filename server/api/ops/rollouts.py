"""Roll-outs of a strategy instance over HTTP: list, start, pause, resume, advance and abort them; measured fidelity.

Their controller, which the engine asks, checks their settings, and answers with JSON of its own, which passes through.
`AuthenticationMiddleware` in server/api/http/middleware.py checks keys and tokens. Knows neither stages nor guards.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Header, Path, Response
from pydantic import BeforeValidator, Field

from config.rollouts import Percentage, read_guard
from config.units import Duration
from config.wording import format_value
from server.api.http.api_keys import get_bearer_token, hash_api_key
from server.api.http.errors import ApiError, make_error_responses
from server.api.http.json_body import Body
from server.api.http.json_route import StrictJsonRoute
from server.api.http.middleware import FIDELITY_PATH, ROLLOUTS_PATH
from server.api.ops.monitoring import CachedAnswer
from server.engine.ipc.client import EngineClient
from server.engine.ipc.messages import ControlRollout, StartRollout

NAME_PATTERN = r"^[A-Za-z0-9_-]{1,100}$"
OPERATOR_HASH_LENGTH = 8  # hexadecimal digits of the admin token's hash by which the log names an operator

RolloutName = Annotated[str, Path(description="name of the roll-out")]
AdminToken = Annotated[str | None, Header(alias="authorization", include_in_schema=False)]


def _check_bound(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f'should be a number, or "off", not {format_value(value)}')
    return value


Bound = Annotated[float | str, BeforeValidator(_check_bound)]  # the controller checks what it is


class GuardRequest(Body):
    """Bounds that the candidate has to keep, as in the table [rollouts.NAME.guard]; "off" checks nothing."""

    path_prefix = "guard."

    board: bool | None = Field(
        None, description="take the bounds that are not given from the board of the setting `board`"
    )
    kl_mean: Bound | None = Field(None, description="greatest mean KL divergence per token, in nats")
    kl_p99: Bound | None = Field(None, description="greatest 99th percentile of the KL divergence, in nats")
    top1: Bound | None = Field(None, description="least share of tokens with the same likeliest token, 0 to 1")
    ttft_p95_ratio: Bound | None = Field(
        None, description="greatest ratio of the 95th percentiles of the time to the first token, candidate to baseline"
    )
    itl_p95_ratio: Bound | None = Field(
        None, description="greatest ratio of the 95th percentiles of the time between tokens, candidate to baseline"
    )
    errors: Bound | None = Field(None, description="greatest share of requests that fail, 0 to 1")
    min_requests: int | None = Field(None, description="least number of requests in a stage before the next begins")


class RolloutRequest(Body):
    """Body of POST /v1/rollouts: a name, and the settings of a table [rollouts.NAME], which the controller checks."""

    name: str = Field(pattern=NAME_PATTERN, description="name of the roll-out: letters, digits, '-' and '_'")
    from_: str = Field(alias="from", description="instance that serves the requests now (the baseline)")
    to: str = Field(description="instance that is to serve them (the candidate)")
    shadow: Percentage | None = Field(
        None, description="share of the requests served by `from` that also run under `to`, such as '5%'"
    )
    canary: list[Percentage] | None = Field(
        None, min_length=1, max_length=100, description="shares of the requests that `to` serves, one for each stage"
    )
    hold: Duration | None = Field(
        None, ge=0, description="least length of each stage: seconds, or a text such as '10m'"
    )
    guard: Annotated[GuardRequest, BeforeValidator(read_guard)] | None = Field(
        None, description='bounds, or "board": those of the board of the setting `board`'
    )

    def to_command(self, by: str) -> StartRollout:
        """Return the command that starts this roll-out, with the settings that were sent; `by` names the operator."""
        settings = self.model_dump(by_alias=True, exclude={"name"}, exclude_none=True)
        return StartRollout(self.name, settings, by)


def reading_router(client: EngineClient) -> APIRouter:
    """Return the router of the routes that change nothing."""
    routes = APIRouter(tags=["roll-outs"], responses=make_error_responses(404, 503))
    rollouts, fidelity = CachedAnswer(client, "rollouts"), CachedAnswer(client, "fidelity")

    @routes.get(ROLLOUTS_PATH)
    async def list_rollouts() -> Response:
        """List all roll-outs: settings, state, stage, share, figures of the guard, and events with their reasons."""
        return Response((await rollouts.get()).body, media_type="application/json")

    @routes.get(f"{ROLLOUTS_PATH}/{{name}}")
    async def show_rollout(name: RolloutName) -> Response:
        """Show one roll-out, as the list has it."""
        listed = msgspec.json.decode((await rollouts.get()).body, type=RolloutList)
        return Response(find_rollout(listed, name), media_type="application/json")

    @routes.get(FIDELITY_PATH)
    async def show_fidelity() -> Response:
        """Show how far candidates are from the instances that serve, by pair of instances, with intervals."""
        return Response((await fidelity.get()).body, media_type="application/json")

    return routes


def command_router(client: EngineClient) -> APIRouter:
    """Return the router of the routes that start and control roll-outs, for operators."""
    routes = APIRouter(
        prefix=ROLLOUTS_PATH,
        route_class=StrictJsonRoute,
        tags=["administration"],
        responses=make_error_responses(400, 401, 403, 404, 409, 413, 503),
    )

    async def send_command(command: StartRollout | ControlRollout) -> Response:
        return Response(await client.query(command), media_type="application/json")

    @routes.post("")
    async def start(body: RolloutRequest, authorization: AdminToken = None) -> Response:
        """Start a roll-out; settings that are left out have the defaults of the settings file."""
        return await send_command(body.to_command(name_operator(authorization)))

    @routes.post("/{name}/pause")
    async def pause(name: RolloutName, authorization: AdminToken = None) -> Response:
        """Keep the present share until the roll-out is resumed; the guard goes on and may still roll back."""
        return await send_command(ControlRollout(name, "pause", name_operator(authorization)))

    @routes.post("/{name}/resume")
    async def resume(name: RolloutName, authorization: AdminToken = None) -> Response:
        """Continue a roll-out that was paused."""
        return await send_command(ControlRollout(name, "resume", name_operator(authorization)))

    @routes.post("/{name}/advance")
    async def advance(name: RolloutName, authorization: AdminToken = None) -> Response:
        """Begin the next stage now, without waiting for `hold` and `min_requests`."""
        return await send_command(ControlRollout(name, "advance", name_operator(authorization)))

    @routes.post("/{name}/abort")
    async def abort(name: RolloutName, authorization: AdminToken = None) -> Response:
        """End a roll-out: all new requests go to the baseline again."""
        return await send_command(ControlRollout(name, "abort", name_operator(authorization)))

    return routes


class RolloutList(msgspec.Struct):
    """The answer to the question "rollouts"; each item of `data` is a JSON object with a `name`."""

    data: list[msgspec.Raw]


class NamedObject(msgspec.Struct):
    """A JSON object of which only the name is read."""

    name: str


def find_rollout(listed: RolloutList, name: str) -> bytes:
    """Return the encoded roll-out with this name. Raises ApiError 404 if there is none."""
    by_name: dict[str, Any] = {msgspec.json.decode(each, type=NamedObject).name: each for each in listed.data}
    if name not in by_name:
        known = f"there is {', '.join(sorted(by_name))}" if by_name else "there is none"
        message = f"the roll-out {name[:100]!r} does not exist; {known}"
        raise ApiError(404, message, code="not_found", log_message="there is no roll-out of that name")
    return bytes(by_name[name])


def name_operator(authorization: str | None) -> str:
    """Return a name for the operator with this admin token, which does not reveal the token: "key 1a2b3c4d"."""
    return f"key {hash_api_key(get_bearer_token(authorization))[:OPERATOR_HASH_LENGTH]}"
