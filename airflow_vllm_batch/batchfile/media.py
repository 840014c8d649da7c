"""Which media a row may name, by scheme and host name alone. Never resolves a name and never fetches anything."""

from __future__ import annotations

import ipaddress
import re
import unicodedata

from airflow_vllm_batch.batchfile.rows import Fault
from airflow_vllm_batch.batchfile.wording import quote
from airflow_vllm_batch.contract import ErrorCode

_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?")
_NUMERIC = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PRIVATE_SUFFIXES = (
    "localhost",
    "localdomain",
    "local",
    "internal",
    "intranet",
    "lan",
    "home.arpa",
    "svc",
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class _HostError(Exception):
    """Why a host is refused, in words that fit behind "media URL refused: "."""


def media_fault(url: object, field: str, allowed_domains: tuple[str, ...] | None) -> Fault | None:
    """Return why a media URL is refused, or None.

    ``data:`` passes, and ``https:`` to a host that is not private in any spelling. With ``allowed_domains`` just
    those hosts pass, whatever they are: the list is the operator's word, the URL is the row's.
    """
    if type(url) is not str:
        return Fault(ErrorCode.INVALID_REQUEST, field, f"{field} must be a string with a URL")
    if url[:5].lower() == "data:":
        return None
    reason = _refusal(url, allowed_domains)
    if reason is None:
        return None
    return Fault(ErrorCode.MEDIA_NOT_ALLOWED, field, f"{field}: media URL refused: {reason}")


def _refusal(url: str, allowed_domains: tuple[str, ...] | None) -> str | None:
    scheme = _SCHEME.match(url)
    if scheme is None:
        return "it has no scheme; data: and https: are allowed, files and bare paths are not"
    name = scheme[0].lower()
    if name not in {"https:", "http:"}:
        # Only the scheme is repeated: the rest may hold a signature.
        return f"scheme {quote(name, 20)}; only data: and https: are allowed"
    if any(character <= " " or character in "\\\x7f" for character in url):
        return "it holds white space, a control character or a backslash"
    rest = url[len(name) :]
    if not rest.startswith("//"):
        return f"{name} must be followed by // and a host"
    authority = re.split(r"[/?#]", rest[2:], maxsplit=1)[0]
    try:
        host = _host(authority)
        if allowed_domains is not None:
            if host not in {domain.lower().rstrip(".") for domain in allowed_domains}:
                return f"host {quote(host)} is not one of allowed_media_domains"
        else:
            _check_public(host)
    except _HostError as error:
        return str(error)
    return None if name == "https:" else 'scheme "http:"; only data: and https: are allowed'


def _host(authority: str) -> str:
    """Return the host in one spelling: lower case, compatibility characters folded, no final dot, no brackets."""
    if "@" in authority:
        raise _HostError("it has a user part before the host")
    if "%" in authority:
        raise _HostError("its host is percent-encoded")
    if authority.startswith("["):
        address, bracket, port = authority[1:].partition("]")
        if not bracket:
            raise _HostError("its host has no closing bracket")
        host = address
        port = port.removeprefix(":") if port.startswith(":") or not port else "?"
    else:
        host, _, port = authority.partition(":")
    if port and not (port.isascii() and port.isdigit()):
        raise _HostError("its port is not a number")
    # What a resolver would fold is folded first: full-width digits and ideographic full stops spell addresses too.
    host = unicodedata.normalize("NFKC", host).replace("。", ".").lower().rstrip(".")
    if not host:
        raise _HostError("it has no host")
    if authority.startswith("[") and ":" not in host:
        raise _HostError(f"host {quote(host)} is not an IPv6 address")
    return host


def _check_public(host: str) -> None:
    address = _address(host)
    if address is not None:
        _check_address(address, host)
        return
    labels = host.split(".")
    if any(host == suffix or host.endswith("." + suffix) for suffix in _PRIVATE_SUFFIXES):
        raise _HostError(f"host {quote(host)} is a loopback or private name")
    if len(labels) == 1:
        raise _HostError(f"host {quote(host)} is not a public name; it has no dot")
    if host.isascii() and not all(_LABEL.fullmatch(label) for label in labels):
        raise _HostError(f"host {quote(host)} is not a host name")


def _address(host: str) -> _Address | None:
    """Read a host as an address in any spelling that a resolver takes: dotted, decimal, hex, short."""
    if ":" in host:
        try:
            return ipaddress.IPv6Address(host)
        except ValueError:
            raise _HostError(f"host {quote(host)} is not an IPv6 address") from None
    parts = host.split(".")
    if not _NUMERIC.fullmatch(parts[-1]):
        return None
    try:
        numbers = [_number(part) for part in parts]
        *high, low = numbers
        if len(numbers) > 4 or any(number > 255 for number in high) or low >= 256 ** (5 - len(numbers)):
            raise ValueError
    except ValueError:
        raise _HostError(f"host {quote(host)} is neither a name nor an address") from None
    value = low
    for position, number in enumerate(high):
        value += number << (24 - 8 * position)
    return ipaddress.IPv4Address(value)


def _number(part: str) -> int:
    # A leading zero means octal to one resolver and nothing to the next, so no address with one is clear: with
    # base 0, int() refuses it too.
    if not _NUMERIC.fullmatch(part):
        raise ValueError(part)
    return int(part, 0)


def _check_address(address: _Address, host: str) -> None:
    for inner in _embedded(address):
        if inner.is_loopback:
            what = "a loopback address"
        elif inner.is_link_local:
            what = "a link-local address"
        elif inner.is_private or inner.is_unspecified or inner.is_multicast or not inner.is_global:
            what = "a private or reserved address"
        else:
            continue
        raise _HostError(f"host {quote(host)} is {what}")


def _embedded(address: _Address) -> list[_Address]:
    """Return the address and those that it carries inside."""
    found: list[_Address] = [address]
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return [address.ipv4_mapped]
        if address.sixtofour is not None:
            found.append(address.sixtofour)
        if address.teredo is not None:
            found.extend(address.teredo)
        if address in _NAT64:
            found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if int(address) >> 32 == 0:
            found.append(ipaddress.IPv4Address(int(address)))
    return found
