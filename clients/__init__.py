"""The Python client: `Client`, and `AsyncClient` for asyncio."""

from foreword.clients.async_client import AsyncClient
from foreword.clients.async_session import AsyncSession
from foreword.clients.channel import SERVICE_CONFIG
from foreword.clients.client import Client
from foreword.clients.errors import FieldViolation, ForewordClientError
from foreword.clients.generation import Generation
from foreword.clients.message import Message
from foreword.clients.session import Session
from foreword.clients.spec import GenerationOptions, Prompt
from foreword.clients.stream import AsyncGenerationStream, GenerationStream
from foreword.v1.constraint_pb2 import Constraint

__all__ = [
    "SERVICE_CONFIG",
    "AsyncClient",
    "AsyncGenerationStream",
    "AsyncSession",
    "Client",
    "Constraint",
    "FieldViolation",
    "ForewordClientError",
    "Generation",
    "GenerationOptions",
    "GenerationStream",
    "Message",
    "Prompt",
    "Session",
]
