//! Hexadecimal digits.

const DIGITS: [u8; 16] = *b"0123456789abcdef";

/// Value of each character as a hexadecimal digit; 255 for other characters.
const VALUES: [u8; 256] = {
    let (mut values, mut value) = ([255; 256], 0);
    while value < 16 {
        values[DIGITS[value] as usize] = value as u8;
        values[DIGITS[value].to_ascii_uppercase() as usize] = value as u8;
        value += 1;
    }
    values
};

/// Lower-case hexadecimal digits.
pub fn encode(bytes: &[u8]) -> String {
    let digit = |value: u8| char::from(DIGITS[usize::from(value)]);
    bytes.iter().flat_map(|b| [digit(b >> 4), digit(b & 15)]).collect()
}

/// The bytes of hexadecimal digits of either case; none for other text.
pub fn decode(text: &str) -> Option<Vec<u8>> {
    let mut seen = 0;
    let byte = |pair: &[u8]| {
        let [high, low] = [pair[0], pair[1]].map(|digit| VALUES[usize::from(digit)]);
        seen |= high | low;
        high << 4 | low
    };
    let bytes = text.as_bytes().chunks_exact(2).map(byte).collect();
    (text.len().is_multiple_of(2) && seen < 16).then_some(bytes)
}
