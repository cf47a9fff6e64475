//! The element types of safetensors, in one table: every path that needs a width or a name reads it here.

use std::{fmt, str::FromStr};

macro_rules! dtypes {
    ($($variant:ident $name:literal $bits:literal $doc:literal;)*) => {
        /// An element type as safetensors names it.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Dtype {
            $(#[doc = $doc] $variant,)*
        }

        impl Dtype {
            /// Every element type, narrowest first as safetensors lists them.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// The name in a safetensors header.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            /// Bits of one element. Below 8 the elements are packed along the last dimension.
            pub const fn bits(self) -> u64 {
                match self { $(Self::$variant => $bits),* }
            }

            /// The type of that name, exactly as spelt in a header.
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($name => Some(Self::$variant),)* _ => None }
            }
        }
    };
}

// Widths: safetensors 0.8, `Dtype::bitsize`.
dtypes! {
    Bool "BOOL" 8 "One byte, 0 or 1.";
    F4 "F4" 4 "MXFP4 element (E2M1), two to a byte.";
    F6E2M3 "F6_E2M3" 6 "MXFP6 element, E2M3.";
    F6E3M2 "F6_E3M2" 6 "MXFP6 element, E3M2.";
    U8 "U8" 8 "Unsigned, 8 bits.";
    I8 "I8" 8 "Signed, 8 bits.";
    F8E5M2 "F8_E5M2" 8 "Float, E5M2.";
    F8E4M3 "F8_E4M3" 8 "Float, E4M3.";
    F8E8M0 "F8_E8M0" 8 "Scale: an exponent only.";
    F8E4M3Fnuz "F8_E4M3FNUZ" 8 "Float, E4M3 without negative zero.";
    F8E5M2Fnuz "F8_E5M2FNUZ" 8 "Float, E5M2 without negative zero.";
    I16 "I16" 16 "Signed, 16 bits.";
    U16 "U16" 16 "Unsigned, 16 bits.";
    F16 "F16" 16 "IEEE half.";
    Bf16 "BF16" 16 "Brain float.";
    I32 "I32" 32 "Signed, 32 bits.";
    U32 "U32" 32 "Unsigned, 32 bits.";
    F32 "F32" 32 "IEEE single.";
    C64 "C64" 64 "Complex of two singles.";
    F64 "F64" 64 "IEEE double.";
    I64 "I64" 64 "Signed, 64 bits.";
    U64 "U64" 64 "Unsigned, 64 bits.";
}

/// Why a shape of a type has no size in bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// The product of the dimensions and the width is past u64.
    #[error("shape times {bits} bits is past 64 bits")]
    Overflow {
        /// Bits of one element.
        bits: u64,
    },
    /// Elements narrower than a byte that end inside one.
    #[error("{bits} bits is no whole number of bytes")]
    PartOfAByte {
        /// Bits of the whole tensor.
        bits: u64,
    },
}

impl Dtype {
    /// Bytes of a tensor of this type and `shape` (an empty shape is one element).
    pub fn bytes_of(self, shape: &[u64]) -> Result<u64, SizeError> {
        let overflow = SizeError::Overflow { bits: self.bits() };
        // Zeros count as one here, as in torch's strides, so that no stride of an accepted shape overflows.
        let mut elements = 1u64;
        for &dim in shape {
            elements = elements.checked_mul(dim.max(1)).ok_or_else(|| overflow.clone())?;
        }
        if shape.contains(&0) {
            return Ok(0);
        }
        // u128 holds elements x bits exactly, so a tensor of almost 2^64 bytes is not refused for its bits.
        let bits = u128::from(elements) * u128::from(self.bits());
        if bits % 8 != 0 {
            return Err(SizeError::PartOfAByte { bits: u64::try_from(bits).map_err(|_| overflow)? });
        }
        u64::try_from(bits / 8).map_err(|_| overflow)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no element type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no safetensors dtype")]
pub struct UnknownDtype(pub String);

impl FromStr for Dtype {
    type Err = UnknownDtype;

    fn from_str(name: &str) -> Result<Self, UnknownDtype> {
        Self::from_name(name).ok_or_else(|| UnknownDtype(name.to_owned()))
    }
}

impl serde::Serialize for Dtype {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(self.name())
    }
}

impl<'de> serde::Deserialize<'de> for Dtype {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let name = <std::borrow::Cow<'de, str>>::deserialize(d)?;
        name.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_name_reads_back() {
        assert_eq!(Dtype::ALL.len(), 22);
        for &dtype in Dtype::ALL {
            assert_eq!(dtype.name().parse(), Ok(dtype));
            assert_eq!(serde_json::to_string(&dtype).unwrap(), format!("\"{}\"", dtype.name()));
        }
        assert_eq!("f32".parse::<Dtype>(), Err(UnknownDtype("f32".into())));
    }

    #[test]
    fn packed_types_must_fill_whole_bytes() {
        assert_eq!(Dtype::F4.bytes_of(&[2, 8]), Ok(8));
        assert_eq!(Dtype::F4.bytes_of(&[3]), Err(SizeError::PartOfAByte { bits: 12 }));
        assert_eq!(Dtype::F6E2M3.bytes_of(&[4]), Ok(3));
        assert_eq!(Dtype::F6E3M2.bytes_of(&[2]), Err(SizeError::PartOfAByte { bits: 12 }));
    }

    #[test]
    fn scalars_have_one_element_and_a_zero_dimension_none() {
        assert_eq!(Dtype::F32.bytes_of(&[]), Ok(4));
        assert_eq!(Dtype::F64.bytes_of(&[u64::MAX, 0]), Ok(0));
        assert_eq!(Dtype::F64.bytes_of(&[0, u64::MAX, 2]), Err(SizeError::Overflow { bits: 64 }));
        assert_eq!(Dtype::F64.bytes_of(&[u64::MAX]), Err(SizeError::Overflow { bits: 64 }));
        assert_eq!(Dtype::U8.bytes_of(&[u64::MAX]), Ok(u64::MAX));
    }

    proptest! {
        #[test]
        fn no_shape_panics(shape in prop::collection::vec(any::<u64>(), 0..6), which in 0..22usize) {
            let _ = Dtype::ALL[which].bytes_of(&shape);
        }
    }
}
