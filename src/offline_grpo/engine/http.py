"""HTTP to an inference server: answers as JSON, everything else as one line that names the URL and the cause."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import httpx

from offline_grpo.errors import EngineError

logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request

SAFE_TO_RETRY_STATUS = (429, 502, 503, 504)
"""The server, or a proxy before it, says that it has not handled the request."""


class ServerApi:
    """Calls that control a server, one at a time.

    Args:
        timeout_s: for a call that names none of its own.
    """

    def __init__(self, base_url: str, api_key: str | None, *, timeout_s: float = 120.0) -> None:
        self._http = httpx.Client(base_url=base_url, headers=authorization(api_key), timeout=timeout_s, trust_env=False)

    def get(self, path: str) -> Any:
        """The body of GET `path`: parsed JSON, or None where it is empty.

        Raises:
            EngineError: no connection, no answer in time, a status of 400 or above, or no JSON.
        """
        return self._call("GET", path)

    def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, params: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> Any:
        """The body of POST `path`, see `get`."""
        return self._call("POST", path, json=body, params=params, timeout=timeout_s)

    def answers(self, path: str) -> bool:
        """Whether GET `path` succeeds now."""
        try:
            return self._http.get(path, timeout=5.0).is_success
        except httpx.HTTPError:
            return False

    def has(self, path: str) -> bool:
        """Whether there is a route for POST `path`; asked with GET, which changes nothing and which such routes refuse with status 405.

        Raises:
            EngineError: no connection, or no permission.
        """
        try:
            response = self._http.get(path)
        except httpx.HTTPError as error:
            raise self._broken(path, error) from error
        if response.status_code not in (404, 405):
            body_of(response)
        return response.status_code != 404

    def _call(self, method: str, path: str, *, timeout: float | None = None, **arguments: Any) -> Any:
        try:
            response = self._http.request(method, path, timeout=timeout or self._http.timeout, **arguments)
        except httpx.HTTPError as error:
            raise self._broken(path, error) from error
        return body_of(response)

    def _broken(self, path: str, error: httpx.HTTPError) -> EngineError:
        return EngineError(f"{str(self._http.base_url).rstrip('/')}{path}: {describe(error)}")


def authorization(api_key: str | None) -> dict[str, str]:
    """The header that vLLM and SGLang expect where they were given a key."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def body_of(response: httpx.Response) -> Any:
    """Parsed JSON (the text where it is not declared as JSON, None where it is empty).

    Raises:
        EngineError: a status of 400 or above, with what the server says about it, or a body that is no JSON.
    """
    url = response.url
    if response.status_code >= 400:
        raise EngineError(f"{url}: status {response.status_code}: {_reason(response)}")
    if not response.content:
        return None
    if "json" not in response.headers.get("content-type", ""):
        return response.text
    try:
        return response.json()
    except ValueError as error:
        raise EngineError(f"{url}: a malformed answer, no JSON ({error}): {response.text[:200]}") from error


def describe(error: httpx.HTTPError) -> str:
    """A transport error in words."""
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    if isinstance(error, httpx.ConnectError):
        return f"no connection ({error})"
    return f"the connection broke ({str(error) or type(error).__name__})"


def _reason(response: httpx.Response) -> str:
    try:
        body = response.json()
    except ValueError:
        return response.text[:300] or "no reason given"
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:600]
