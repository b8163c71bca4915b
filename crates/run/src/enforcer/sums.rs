//! Element-wise reduction of received elements into local ones.

use bytemuck::{AnyBitPattern, NoUninit};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use ir::DType;

use super::EnforcerError;

/// The reduction operator of two elements. All are commutative and, except for rounding, associative.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Sum; integers wrap around.
    Sum,
    /// Product; integers wrap around.
    Product,
    /// Maximum.
    Max,
    /// Minimum.
    Min,
    /// Bitwise AND; for integers and booleans only, as the next two.
    And,
    /// Bitwise OR.
    Or,
    /// Bitwise XOR.
    Xor,
}

impl Reduction {
    fn is_of_bits(self) -> bool {
        matches!(self, Self::And | Self::Or | Self::Xor)
    }
}

/// The element type of a collective and its reduction operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Elements {
    dtype: DType,
    reduction: Reduction,
}

/// Number of half-precision elements that are converted to single precision and reduced at a time.
const HALVES: usize = 1024;

impl Elements {
    /// Creates the pair of an element type and a reduction operator.
    ///
    /// # Errors
    /// The type is not a boolean, integer or real floating-point type of at least one byte, or the
    /// operator is bitwise and the type is floating-point.
    pub fn new(dtype: DType, reduction: Reduction) -> Result<Self, EnforcerError> {
        use DType::{BF16, Bool, F16, F32, F64, S8, S16, S32, S64, U8, U16, U32, U64};
        match dtype {
            F16 | BF16 | F32 | F64 if reduction.is_of_bits() => {
                Err(EnforcerError::Bits { dtype: dtype.name() })
            }
            Bool | S8 | S16 | S32 | S64 | U8 | U16 | U32 | U64 | F16 | BF16 | F32 | F64 => {
                Ok(Self { dtype, reduction })
            }
            _ => Err(EnforcerError::Elements { dtype: dtype.name() }),
        }
    }

    /// Returns the element type.
    pub fn dtype(self) -> DType {
        self.dtype
    }

    /// Returns the reduction operator.
    pub fn reduction(self) -> Reduction {
        self.reduction
    }

    /// Returns the size of an element in bytes.
    pub fn size(self) -> usize {
        (self.dtype.bits() / 8) as usize
    }

    /// Reduces received elements (`came`) into local ones (`there`), in place.
    ///
    /// # Panics
    /// The slices differ in length, or are not aligned to whole elements.
    pub fn combine(self, there: &mut [u8], came: &[u8]) {
        match self.dtype {
            DType::F32 => self.floats::<f32>(there, came),
            DType::F64 => self.floats::<f64>(there, came),
            DType::F16 => self.halves::<f16>(there, came),
            DType::BF16 => self.halves::<bf16>(there, came),
            DType::S8 => self.integers::<i8>(there, came),
            DType::S16 => self.integers::<i16>(there, came),
            DType::S32 => self.integers::<i32>(there, came),
            DType::S64 => self.integers::<i64>(there, came),
            // The sum of booleans is their logical OR, their maximum; the product is AND, their
            // minimum.
            DType::Bool => Self { reduction: self.truth(), ..self }.integers::<u8>(there, came),
            DType::U8 => self.integers::<u8>(there, came),
            DType::U16 => self.integers::<u16>(there, came),
            DType::U32 => self.integers::<u32>(there, came),
            DType::U64 => self.integers::<u64>(there, came),
            other => unreachable!("{} cannot be combined, which was checked", other.name()),
        }
    }

    /// Reduces this rank's elements with those of other ranks, which must come in rank order: the
    /// result is bitwise identical on all ranks.
    ///
    /// # Arguments
    /// - `sum`: scratch memory for partial sums that do not start with this rank's own elements;
    ///   reusable.
    ///
    /// # Errors
    /// The first error that `others` yields.
    pub(super) fn combine_in_order<'a>(
        self,
        (own, rank): (&mut [u8], u32),
        others: impl Iterator<Item = Result<(u32, &'a [u8]), EnforcerError>>,
        sum: &mut Vec<u8>,
    ) -> Result<(), EnforcerError> {
        sum.clear();
        let add_own = |own: &mut [u8], sum: &mut Vec<u8>| {
            if !sum.is_empty() {
                self.combine(sum, own);
                own.copy_from_slice(sum);
                sum.clear();
            }
        };
        for other in others {
            let (from, came) = other?;
            if from > rank {
                add_own(own, sum);
                self.combine(own, came);
            } else if sum.is_empty() {
                sum.extend_from_slice(came);
            } else {
                self.combine(sum, came);
            }
        }
        add_own(own, sum);
        Ok(())
    }

    fn truth(self) -> Reduction {
        match self.reduction {
            Reduction::Sum | Reduction::Max => Reduction::Max,
            Reduction::Product | Reduction::Min => Reduction::Min,
            bits => bits,
        }
    }

    fn floats<T: Float>(self, there: &mut [u8], came: &[u8]) {
        let (there, came) = views::<T>(there, came);
        match self.reduction {
            Reduction::Sum => each(there, came, |a, b| a + b),
            Reduction::Product => each(there, came, |a, b| a * b),
            Reduction::Max => each(there, came, T::max),
            Reduction::Min => each(there, came, T::min),
            Reduction::And | Reduction::Or | Reduction::Xor => {
                unreachable!("bits of floating-point numbers are not combined, which was checked")
            }
        }
    }

    fn integers<T: Integer>(self, there: &mut [u8], came: &[u8]) {
        let (there, came) = views::<T>(there, came);
        match self.reduction {
            Reduction::Sum => each(there, came, T::sum),
            Reduction::Product => each(there, came, T::product),
            Reduction::Max => each(there, came, T::max),
            Reduction::Min => each(there, came, T::min),
            Reduction::And => each(there, came, |a, b| a & b),
            Reduction::Or => each(there, came, |a, b| a | b),
            Reduction::Xor => each(there, came, |a, b| a ^ b),
        }
    }

    fn halves<T>(self, there: &mut [u8], came: &[u8])
    where
        T: AnyBitPattern + NoUninit,
        [T]: HalfFloatSliceExt,
    {
        let (there, came) = views::<T>(there, came);
        let (mut a, mut b) = ([0.0_f32; HALVES], [0.0_f32; HALVES]);
        for (there, came) in there.chunks_mut(HALVES).zip(came.chunks(HALVES)) {
            let (a, b) = (&mut a[..there.len()], &mut b[..there.len()]);
            there.convert_to_f32_slice(a);
            came.convert_to_f32_slice(b);
            let wide = Self { dtype: DType::F32, ..self };
            wide.floats::<f32>(bytemuck::cast_slice_mut(a), bytemuck::cast_slice(b));
            there.convert_from_f32_slice(a);
        }
    }
}

fn views<'a, T: AnyBitPattern + NoUninit>(
    there: &'a mut [u8],
    came: &'a [u8],
) -> (&'a mut [T], &'a [T]) {
    assert_eq!(there.len(), came.len(), "as many elements come as are there");
    (bytemuck::cast_slice_mut(there), bytemuck::cast_slice(came))
}

fn each<T: Copy>(there: &mut [T], came: &[T], combine: impl Fn(T, T) -> T) {
    for (one, &other) in there.iter_mut().zip(came) {
        *one = combine(*one, other);
    }
}

trait Float:
    AnyBitPattern + NoUninit + std::ops::Add<Output = Self> + std::ops::Mul<Output = Self>
{
    /// The maximum; NaN propagates, as in XLA.
    fn max(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
}

trait Integer:
    AnyBitPattern
    + NoUninit
    + Ord
    + std::ops::BitAnd<Output = Self>
    + std::ops::BitOr<Output = Self>
    + std::ops::BitXor<Output = Self>
{
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
}

macro_rules! floats {
    ($($name:ty)*) => {$(
        impl Float for $name {
            fn max(self, other: Self) -> Self {
                if self > other || self.is_nan() { self } else { other }
            }
            fn min(self, other: Self) -> Self {
                if self < other || self.is_nan() { self } else { other }
            }
        }
    )*};
}

macro_rules! integers {
    ($($name:ty)*) => {$(
        impl Integer for $name {
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            fn product(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
        }
    )*};
}

floats!(f32 f64);
integers!(i8 i16 i32 i64 u8 u16 u32 u64);

#[cfg(test)]
mod tests {
    use super::*;

    fn combined<T: AnyBitPattern + NoUninit>(
        dtype: DType,
        reduction: Reduction,
        there: &[T],
        came: &[T],
    ) -> Vec<T> {
        let mut result = there.to_vec();
        let elements = Elements::new(dtype, reduction).unwrap();
        elements.combine(bytemuck::cast_slice_mut(&mut result), bytemuck::cast_slice(came));
        result
    }

    #[test]
    fn every_type_adds_up() {
        assert_eq!(
            combined(DType::F32, Reduction::Sum, &[1.5_f32, 2.0], &[0.25, -2.0]),
            [1.75, 0.0]
        );
        assert_eq!(combined(DType::F64, Reduction::Product, &[1.5_f64], &[4.0]), [6.0]);
        assert_eq!(combined(DType::S8, Reduction::Sum, &[127_i8, -1], &[1, -1]), [-128, -2]);
        assert_eq!(combined(DType::U64, Reduction::Max, &[3_u64, 9], &[4, 1]), [4, 9]);
        assert_eq!(combined(DType::Bool, Reduction::Sum, &[1_u8, 0, 0], &[1, 1, 0]), [1, 1, 0]);
        let bits = [Reduction::And, Reduction::Or, Reduction::Xor];
        let of_bits = bits.map(|how| combined(DType::S16, how, &[0b1100_i16, -1], &[0b1010, 5]));
        assert_eq!(of_bits, [[0b1000, 5], [0b1110, -1], [0b0110, !5]]);
        let truths = bits.map(|how| combined(DType::Bool, how, &[1_u8, 1, 0], &[1, 0, 0]));
        assert_eq!(truths, [[1, 0, 0], [1, 1, 0], [0, 1, 0]]);
        let many: Vec<u16> = (0..3000).map(|i| bf16::from_f32(i as f32).to_bits()).collect();
        let twice = combined(DType::BF16, Reduction::Sum, &many, &many);
        for (one, two) in many.iter().zip(twice) {
            let expected = bf16::from_f32(2.0 * bf16::from_bits(*one).to_f32());
            assert_eq!(bf16::from_bits(two), expected);
        }
        let halves = [f16::from_f32(0.5).to_bits(), f16::from_f32(1.0).to_bits()];
        let sums = combined(DType::F16, Reduction::Sum, &halves, &halves);
        assert_eq!(sums, [f16::from_f32(1.0).to_bits(), f16::from_f32(2.0).to_bits()]);
    }

    #[test]
    fn what_is_no_number_stays() {
        let sums = combined(DType::F32, Reduction::Max, &[f32::NAN, 1.0], &[1.0, f32::NAN]);
        assert!(sums.iter().all(|value| value.is_nan()));
        assert!(Elements::new(DType::C64, Reduction::Sum).is_err());
        for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            assert_eq!(
                Elements::new(dtype, Reduction::Xor),
                Err(EnforcerError::Bits { dtype: dtype.name() })
            );
        }
    }
}
