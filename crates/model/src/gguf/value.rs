//! Typed metadata values of a GGUF file.

/// One metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Unsigned 8-bit integer.
    U8(u8),
    /// Signed 8-bit integer.
    I8(i8),
    /// Unsigned 16-bit integer.
    U16(u16),
    /// Signed 16-bit integer.
    I16(i16),
    /// Unsigned 32-bit integer.
    U32(u32),
    /// Signed 32-bit integer.
    I32(i32),
    /// Unsigned 64-bit integer.
    U64(u64),
    /// Signed 64-bit integer.
    I64(i64),
    /// 32-bit floating-point number.
    F32(f32),
    /// 64-bit floating-point number.
    F64(f64),
    /// Truth value.
    Bool(bool),
    /// UTF-8 string.
    String(String),
    /// Array of values of one type.
    Array(Array),
}

/// An array of values of one type.
#[derive(Debug, Clone, PartialEq)]
pub enum Array {
    /// Unsigned 8-bit integers.
    U8(Vec<u8>),
    /// Signed 8-bit integers.
    I8(Vec<i8>),
    /// Unsigned 16-bit integers.
    U16(Vec<u16>),
    /// Signed 16-bit integers.
    I16(Vec<i16>),
    /// Unsigned 32-bit integers.
    U32(Vec<u32>),
    /// Signed 32-bit integers.
    I32(Vec<i32>),
    /// Unsigned 64-bit integers.
    U64(Vec<u64>),
    /// Signed 64-bit integers.
    I64(Vec<i64>),
    /// 32-bit floating-point numbers.
    F32(Vec<f32>),
    /// 64-bit floating-point numbers.
    F64(Vec<f64>),
    /// Truth values.
    Bool(Vec<bool>),
    /// UTF-8 strings.
    String(Vec<String>),
    /// Arrays.
    Array(Vec<Array>),
}

impl Value {
    /// The value as an unsigned 32-bit integer, if it is an integer that fits.
    #[must_use]
    pub fn as_u32(&self) -> Option<u32> {
        match *self {
            Self::U8(v) => Some(v.into()),
            Self::U16(v) => Some(v.into()),
            Self::U32(v) => Some(v),
            Self::U64(v) => v.try_into().ok(),
            Self::I8(v) => v.try_into().ok(),
            Self::I16(v) => v.try_into().ok(),
            Self::I32(v) => v.try_into().ok(),
            Self::I64(v) => v.try_into().ok(),
            _ => None,
        }
    }

    /// The value as a 32-bit floating-point number, if it is a floating-point number.
    #[must_use]
    pub fn as_f32(&self) -> Option<f32> {
        match *self {
            Self::F32(v) => Some(v),
            Self::F64(v) => Some(v as f32),
            _ => None,
        }
    }

    /// The truth value, if it is one.
    #[must_use]
    pub fn as_bool(&self) -> Option<bool> {
        if let Self::Bool(v) = *self { Some(v) } else { None }
    }

    /// The string, if it is one.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        if let Self::String(v) = self { Some(v) } else { None }
    }

    /// A description of the value, short enough for an error message.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::U8(v) => format!("the integer {v}"),
            Self::I8(v) => format!("the integer {v}"),
            Self::U16(v) => format!("the integer {v}"),
            Self::I16(v) => format!("the integer {v}"),
            Self::U32(v) => format!("the integer {v}"),
            Self::I32(v) => format!("the integer {v}"),
            Self::U64(v) => format!("the integer {v}"),
            Self::I64(v) => format!("the integer {v}"),
            Self::F32(v) => format!("the number {v}"),
            Self::F64(v) => format!("the number {v}"),
            Self::Bool(v) => format!("the truth value {v}"),
            Self::String(v) if v.chars().count() <= 40 => format!("the string '{}'", v.escape_debug()),
            Self::String(v) => format!("a string of {} bytes", v.len()),
            Self::Array(a) => a.describe(),
        }
    }
}

impl Array {
    /// How many elements there are.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::U8(v) => v.len(),
            Self::I8(v) => v.len(),
            Self::U16(v) => v.len(),
            Self::I16(v) => v.len(),
            Self::U32(v) => v.len(),
            Self::I32(v) => v.len(),
            Self::U64(v) => v.len(),
            Self::I64(v) => v.len(),
            Self::F32(v) => v.len(),
            Self::F64(v) => v.len(),
            Self::Bool(v) => v.len(),
            Self::String(v) => v.len(),
            Self::Array(v) => v.len(),
        }
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn describe(&self) -> String {
        let of = match self {
            Self::U8(_) | Self::I8(_) | Self::U16(_) | Self::I16(_) => "small integers",
            Self::U32(_) => "unsigned 32-bit integers",
            Self::I32(_) => "signed 32-bit integers",
            Self::U64(_) | Self::I64(_) => "64-bit integers",
            Self::F32(_) => "32-bit numbers",
            Self::F64(_) => "64-bit numbers",
            Self::Bool(_) => "truth values",
            Self::String(_) => "strings",
            Self::Array(_) => "arrays",
        };
        format!("an array of {} {of}", self.len())
    }
}
