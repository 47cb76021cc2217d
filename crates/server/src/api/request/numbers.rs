//! Whole numbers of requests. Clients whose language has no others write them as `8.0`.

use serde::de::{Error as _, Unexpected};
use serde::{Deserialize, Deserializer};
use serde_json::Number;

/// Whole numbers up to this are told apart as `f64`.
const MOST_OF_F64: f64 = (1_u64 << 53) as f64;

/// The whole number that a number is.
pub(super) fn whole(number: &Number) -> Option<i64> {
    let is_whole = |number: &f64| number.fract() == 0.0 && number.abs() <= MOST_OF_F64;
    number.as_i64().or_else(|| Some(number.as_f64().filter(is_whole)? as i64))
}

/// Reads a whole number, or `null` as none.
pub(in crate::api) fn whole_number<'de, D: Deserializer<'de>, T: TryFrom<i64>>(
    from: D,
) -> Result<Option<T>, D::Error> {
    let Some(number) = Option::<Number>::deserialize(from)? else { return Ok(None) };
    let (whole, text) = (whole(&number), number.to_string());
    let wrong = |expected: &str| D::Error::invalid_value(Unexpected::Other(&text), &expected);
    let whole = whole.ok_or_else(|| wrong("a whole number"))?;
    T::try_from(whole).map(Some).map_err(|_| wrong("a whole number of at least 0"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn whole_numbers_may_be_written_as_floats() {
        let read = |value: Value| whole_number::<_, i64>(value).map_err(|error| error.to_string());
        for (given, expected) in [
            (json!(8), Some(8)),
            (json!(8.0), Some(8)),
            (json!(-1.0), Some(-1)),
            (json!(i64::MIN), Some(i64::MIN)),
            (Value::Null, None),
        ] {
            assert_eq!(read(given), Ok(expected));
        }
        for wrong in [json!(8.5), json!(1e300), json!(u64::MAX), json!("8")] {
            assert!(read(wrong.clone()).is_err(), "{wrong}");
        }
        let error = whole_number::<_, usize>(json!(-1)).unwrap_err().to_string();
        assert_eq!(error, "invalid value: -1, expected a whole number of at least 0");
    }
}
