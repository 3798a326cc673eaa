//! Sizes in bytes, in the form that people write.

use std::{fmt, str::FromStr};

use serde::Deserialize;

/// A number of bytes, written plain or with a unit: `512MiB`, `1GiB`, `1073741824`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "SizeValue")]
pub struct ByteSize(pub u64);

#[derive(Deserialize)]
#[serde(untagged)]
enum SizeValue {
    Bytes(u64),
    Text(String),
}

impl TryFrom<SizeValue> for ByteSize {
    type Error = ByteSizeError;

    fn try_from(value: SizeValue) -> Result<Self, ByteSizeError> {
        match value {
            SizeValue::Bytes(bytes) => Ok(Self(bytes)),
            SizeValue::Text(text) => text.parse(),
        }
    }
}

impl FromStr for ByteSize {
    type Err = ByteSizeError;

    fn from_str(text: &str) -> Result<Self, ByteSizeError> {
        const UNITS: [(&str, u32); 5] = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40), ("B", 0)];
        let parse = || {
            let (number, shift) = UNITS
                .iter()
                .find_map(|(unit, shift)| Some((text.strip_suffix(unit)?.trim_end(), *shift)))
                .unwrap_or((text, 0));
            let digits = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
            digits.then_some(number)?.parse::<u64>().ok()?.checked_mul(1 << shift)
        };
        parse().map(Self).ok_or_else(|| ByteSizeError(text.to_owned()))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = [("GiB", 30), ("MiB", 20), ("KiB", 10)]
            .into_iter()
            .find(|(_, shift)| self.0 != 0 && self.0.trailing_zeros() >= *shift);
        match exact {
            Some((unit, shift)) => write!(formatter, "{}{unit}", self.0 >> shift),
            None => write!(formatter, "{}", self.0),
        }
    }
}

/// The text is not a number of bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a size: a number of bytes, or one with KiB, MiB, GiB or TiB behind it")]
pub struct ByteSizeError(String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_size_is_a_number_with_an_optional_binary_unit() {
        for (text, bytes) in
            [("0", 0), ("17", 17), ("4KiB", 4096), ("1 GiB", 1 << 30), ("3TiB", 3 << 40), ("9B", 9)]
        {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        for text in ["", "GiB", "1GB", "1.5GiB", "+1", "-1", "99999999TiB", "1GiBB"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text:?} was taken");
        }
        for text in ["0", "4096B", "1GiB", "1025MiB", "3KiB", "17"] {
            let size: ByteSize = text.parse().expect("a size");
            assert_eq!(size.to_string().parse(), Ok(size));
        }
    }
}
