"""What files and batches answer, as models; see `answers.py`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from api.schemas.answers import Answer, Count


class FileObject(Answer):
    """A file: the requests of a batch, or what came of them."""

    id: Annotated[str, Field(pattern="^file-[0-9a-f]+$")]
    object: Literal["file"]
    bytes: Count
    created_at: Count
    expires_at: Count | None
    """When it is deleted, seconds since 1970; null while its batch runs."""
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["uploaded", "processed"]
    """`uploaded`: the results of a running batch, which grow."""
    status_details: str | None


class FileList(Answer):
    """A page of files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(Answer):
    """A file is gone."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchError(Answer):
    """What is wrong with a line of the input file."""

    code: str
    message: str
    line: Annotated[int, Field(ge=1)] | None
    param: str | None


class BatchErrors(Answer):
    """Why the batch failed as a whole; of many faults the first 100."""

    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(Answer):
    """Requests of a batch. `failed`: those in the error file, also those to whose turn it did not come."""

    total: Count
    completed: Count
    failed: Count


class InputTokensDetails(Answer):
    """What the prompts cost."""

    cached_tokens: Count


class OutputTokensDetails(Answer):
    """What of the output was reasoning."""

    reasoning_tokens: Count


class BatchUsage(Answer):
    """Tokens of the completed requests so far."""

    input_tokens: Count
    input_tokens_details: InputTokensDetails
    output_tokens: Count
    output_tokens_details: OutputTokensDetails
    total_tokens: Count


class Batch(Answer):
    """Many requests from a file."""

    id: Annotated[str, Field(pattern="^batch_[0-9a-f]+$")]
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    """The results, once the batch has ended; null if nothing was completed."""
    error_file_id: str | None
    """What was not completed, and why, once the batch has ended; null if all was."""
    created_at: Count
    expires_at: Count
    in_progress_at: Count | None
    finalizing_at: Count | None
    completed_at: Count | None
    failed_at: Count | None
    expired_at: Count | None
    cancelling_at: Count | None
    cancelled_at: Count | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None
    partial_output_file_id: str | None
    """The file that holds what was completed so far, and will be output_file_id."""
    partial_error_file_id: str | None
    replay_of: str | None
    """The batch whose requests that were not completed these are."""


class BatchList(Answer):
    """A page of batches."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


#: Models whose schema stands in the document by its own name.
ANSWERS: tuple[type[Answer], ...] = (FileObject, FileList, FileDeleted, Batch, BatchList)
