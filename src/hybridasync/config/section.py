"""What every section of a recipe is, and the types of its settings."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Positive = Annotated[int, Field(gt=0, strict=True)]
NonNegative = Annotated[int, Field(ge=0, strict=True)]
Seconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Interval = Positive | Literal["auto"]


class Section(BaseModel):
    """A section refuses keys it doesn't know."""

    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _keep_truth_and_number_apart(cls, value: Any, info: ValidationInfo) -> Any:
        """`use_tis = 1`, `lr = true` and `weights = [true]` are mistakes, though Python would convert them."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        kinds = (annotation, *get_args(annotation))
        items = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
        mixed = any((bool in kinds) != isinstance(item, bool) for item in items)
        if mixed and (bool in kinds or float in kinds):
            raise ValueError("a truth value and a number are different things")
        return value
