//! Strict reading of requests.

use serde::{Deserialize, Deserializer, de::DeserializeOwned};
use serde_json::Value;

/// A structure that is read only from a JSON object. By default, serde also reads it from a list of its values.
#[derive(Clone, Copy, Debug)]
pub struct Object<T>(
    /// The structure.
    pub T,
);

impl<'de, T: DeserializeOwned> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        object(deserializer).map(Self)
    }
}

/// Reads a nested structure.
pub fn object<'de, T: DeserializeOwned, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    let mut map = serde_json::Map::deserialize(deserializer)?;
    map.values_mut().for_each(whole);
    serde_json::from_value(map.into()).map_err(serde::de::Error::custom)
}

/// Turns `5.0` into the integer 5, also in a list: JSON allows that form, and some languages write it.
fn whole(value: &mut Value) {
    if let Value::Array(values) = value {
        return values.iter_mut().for_each(whole);
    }
    /// Largest bound up to which each integer is exact as a floating-point number.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let number = value.as_f64().filter(|_| value.is_f64());
    if let Some(number) = number.filter(|number| number.fract() == 0.0 && number.abs() <= EXACT) {
        #[expect(clippy::cast_possible_truncation, reason = "an integer of 54 bits, by the line above")]
        let whole = number as i64;
        *value = whole.into();
    }
}

/// Reads an optional nested structure.
pub fn optional_object<'de, T: DeserializeOwned, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    Ok(Option::<Object<T>>::deserialize(deserializer)?.map(|Object(value)| value))
}

/// Reads a list of structures.
pub fn objects_of<'de, T: DeserializeOwned, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    Ok(Vec::<Object<T>>::deserialize(deserializer)?.into_iter().map(|Object(value)| value).collect())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn integer_with_a_zero_fraction_is_accepted() {
        let read = |text: &str| {
            let Object(numbers): Object<BTreeMap<String, u64>> = serde_json::from_str(text)?;
            Ok::<_, serde_json::Error>(numbers["a"])
        };
        assert_eq!(read("{\"a\": 5.0}").ok(), Some(5));
        for bad in ["{\"a\": 5.5}", "{\"a\": -5.0}", "{\"a\": 1e300}", "[5]"] {
            assert!(read(bad).is_err(), "{bad} was taken");
        }
        let list =
            |text| serde_json::from_str(text).map(|Object(lists): Object<BTreeMap<String, Vec<u64>>>| lists);
        assert_eq!(list("{\"a\": [5.0, 6]}").ok(), Some([("a".to_owned(), vec![5, 6])].into()));
        assert!(list("{\"a\": [5.5]}").is_err(), "a fraction in a list was taken");
    }
}
