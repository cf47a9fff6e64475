//! Byte counts that read and print as people write them: `256MiB`, `512`, `1.5GiB`.

use std::{fmt, str::FromStr};

/// A number of bytes. Parses `512`, `64KiB`, `256MiB`, `1.5GiB`, `2TiB` and the decimal `KB`, `MB`, `GB`,
/// `TB`; prints the shortest exact binary form.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

impl ByteSize {
    /// `n` KiB (1024 bytes each).
    pub const fn kib(n: u64) -> Self {
        Self(n << 10)
    }

    /// `n` MiB.
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    /// `n` GiB.
    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }
}

/// Why a text is not a [`ByteSize`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseByteSizeError {
    /// No number before the unit.
    #[error("`{0}` is not a size: write a number and a unit, such as 256MiB")]
    NotANumber(String),
    /// A unit we do not know.
    #[error("`{unit}` in `{text}` is not a unit of size: use B, KiB, MiB, GiB, TiB (or KB, MB, GB, TB)")]
    UnknownUnit {
        /// What was given.
        text: String,
        /// The part after the number.
        unit: String,
    },
    /// More than 2^64 - 1 bytes, or a fraction of a byte.
    #[error("`{0}` is not a whole number of bytes below 16 EiB")]
    OutOfRange(String),
}

const UNITS: [(&str, u64); 9] = [
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
];

impl FromStr for ByteSize {
    type Err = ParseByteSizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let t = text.trim();
        let split = t.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '_').unwrap_or(t.len());
        let (number, unit) = t.split_at(split);
        let number = number.replace('_', "");
        let unit = unit.trim();
        let scale = match UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)) {
            Some(&(_, scale)) => scale,
            None if unit.is_empty() => 1,
            None if number.is_empty() => return Err(ParseByteSizeError::NotANumber(text.into())),
            None => {
                return Err(ParseByteSizeError::UnknownUnit { text: text.into(), unit: unit.into() });
            }
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((&number, ""));
        if whole.is_empty() || whole.contains('.') || fraction.contains('.') {
            return Err(ParseByteSizeError::NotANumber(text.into()));
        }
        let out_of_range = || ParseByteSizeError::OutOfRange(text.into());
        let whole: u64 = whole.parse().map_err(|_| out_of_range())?;
        let mut bytes = whole.checked_mul(scale).ok_or_else(out_of_range)?;
        if !fraction.is_empty() {
            // fraction / 10^digits of one unit; must come out whole.
            let digits = u32::try_from(fraction.len()).map_err(|_| out_of_range())?;
            let ten = 10u128.checked_pow(digits).ok_or_else(out_of_range)?;
            let part: u128 = fraction.parse().map_err(|_| out_of_range())?;
            let scaled = part.checked_mul(u128::from(scale)).ok_or_else(out_of_range)?;
            if scaled % ten != 0 {
                return Err(out_of_range());
            }
            let part = u64::try_from(scaled / ten).map_err(|_| out_of_range())?;
            bytes = bytes.checked_add(part).ok_or_else(out_of_range)?;
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, shift) in [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)] {
            let scale = 1u64 << shift;
            if self.0 >= scale && self.0.is_multiple_of(scale) {
                return f.pad(&format!("{}{unit}", self.0 >> shift));
            }
        }
        f.pad(&format!("{}B", self.0))
    }
}

impl fmt::Debug for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl serde::Serialize for ByteSize {
    /// As text (`256MiB`), the form configuration files use. JSON reports carry plain byte counts instead.
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for ByteSize {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = ByteSize;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as 256MiB or a number of bytes")
            }
            fn visit_u64<E: serde::de::Error>(self, v: u64) -> Result<ByteSize, E> {
                Ok(ByteSize(v))
            }
            fn visit_i64<E: serde::de::Error>(self, v: i64) -> Result<ByteSize, E> {
                u64::try_from(v).map(ByteSize).map_err(|_| E::custom(format!("{v} is not a size")))
            }
            fn visit_str<E: serde::de::Error>(self, v: &str) -> Result<ByteSize, E> {
                v.parse().map_err(E::custom)
            }
        }
        d.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_read_as_people_write_them() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("256MiB", 256 << 20),
            ("256 mib", 256 << 20),
            ("1.5GiB", 3 << 29),
            ("2GB", 2_000_000_000),
            ("1_024B", 1024),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused_with_its_text() {
        assert_eq!("".parse::<ByteSize>(), Err(ParseByteSizeError::NotANumber("".into())));
        assert_eq!("MiB".parse::<ByteSize>(), Err(ParseByteSizeError::NotANumber("MiB".into())));
        assert_eq!("1.2.3".parse::<ByteSize>(), Err(ParseByteSizeError::NotANumber("1.2.3".into())));
        assert_eq!(
            "5 parsec".parse::<ByteSize>(),
            Err(ParseByteSizeError::UnknownUnit { text: "5 parsec".into(), unit: "parsec".into() })
        );
        for text in ["99999999999TiB", "0.3B", "99999999999999999999"] {
            assert_eq!(text.parse::<ByteSize>(), Err(ParseByteSizeError::OutOfRange(text.into())));
        }
        assert!("-1".parse::<ByteSize>().is_err());
    }

    proptest! {
        #[test]
        fn printed_sizes_read_back(bytes: u64) {
            prop_assert_eq!(ByteSize(bytes).to_string().parse(), Ok(ByteSize(bytes)));
        }

        #[test]
        fn no_text_panics(text in ".{0,24}") {
            let _ = text.parse::<ByteSize>();
        }
    }
}
