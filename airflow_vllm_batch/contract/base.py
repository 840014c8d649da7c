"""The two bases of every document, and the version that both sides compare before they trust one."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

CONTRACT_VERSION = "1.0"
"""``major.minor``. Another major version is refused; a newer minor one may hold fields that we do not read."""


class ContractVersionError(ValueError):
    """The document was written by a package of another major contract version."""


class Authored(BaseModel):
    """Written by a person or an operator: an unknown field is a typo or a newer peer, and is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Reported(BaseModel):
    """Written by the runner: unknown fields are ignored, since whoever reads it later may be older."""

    model_config = ConfigDict(frozen=True, extra="ignore")


def check_contract_version(document: str, found: object) -> None:
    """Refuse a document of another major version.

    :param document: what the document is called in the message, such as ``spec.json``.
    :param found: its ``contract_version`` member as it was read.
    :raises ContractVersionError: where the major version is another one or can't be read.
    """
    ours = CONTRACT_VERSION.partition(".")[0]
    theirs = found.partition(".")[0] if isinstance(found, str) else None
    if theirs != ours:
        raise ContractVersionError(
            f"{document} has contract_version {found!r}, this package reads {ours}.x: "
            "install the same version of airflow-provider-vllm-batch on both sides"
        )


class _Versioned(BaseModel):
    contract_version: str = CONTRACT_VERSION

    @classmethod
    def read(cls, raw: bytes | str, name: str) -> Self:
        """Parse an object's bytes.

        :param raw: UTF-8 JSON.
        :param name: what to call the object in a message.
        :raises ContractVersionError: where it was written by another major version.
        :raises ValueError: where it is no such document; the message has ``name`` and every wrong field.
        """
        try:
            parsed = from_json(raw)
        except ValueError as error:
            raise ValueError(f"{name} is not JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise ValueError(f"{name} must be one JSON object, found {type(parsed).__name__}")
        # Before the fields: a newer document would else be refused for a field that is merely new.
        check_contract_version(name, parsed.get("contract_version"))
        try:
            return cls.model_validate_json(raw)
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, fault['loc'])) or '(whole)'}: {fault['msg']}"
                for fault in error.errors(include_url=False, include_input=False)
            )
            raise ValueError(f"{name} is not a valid {cls.__name__}: {faults}") from error

    def to_bytes(self) -> bytes:
        """Return UTF-8 JSON, indented for people, with a final newline."""
        return self.model_dump_json(indent=1).encode() + b"\n"


class Document(_Versioned, Reported):
    """A whole object in storage that the runner writes."""


class AuthoredDocument(_Versioned, Authored):
    """A whole object in storage that an operator or a person writes."""
