"""Types for tensors with shapes. Without jaxtyping, as on GPU machines with only torch, shapes are not checked."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped
else:
    try:
        from jaxtyping import Bool, Float, Int, Shaped
    except ImportError:

        class _Unchecked:
            def __class_getitem__(cls, item: Any) -> Any:
                return item[0]

        Bool = Float = Int = Shaped = _Unchecked

__all__ = ["Bool", "Float", "Int", "Shaped"]
