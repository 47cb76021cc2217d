//! Bounds on the inflated streams of a PDF: a megabyte of deflated zeros is a gigabyte.
//!
//! `hayro-syntax` inflates a stream whole, without a limit. So all bytes that may be deflated are inflated once before, into nothing,
//! and each stream that is read afterwards has a known chain of filters.

use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};

use flate2::read::{DeflateDecoder, ZlibDecoder};
use hayro_syntax::Filter;
use hayro_syntax::object::Stream;

use crate::error::ReadError;
use crate::limits::{MAX_PART_BYTES, MAX_PDF_BYTES};

/// The most bytes that one byte can stand for, rounded up: in LZW, 3838 behind a code of 12 bits.
const MAX_RATIO: usize = 2600;

/// Asserts that no stream of a file holds more than the limits, as far as its bytes tell.
///
/// Encrypted streams and those under more than one filter are seen again in [`check`].
pub(super) fn check_streams(bytes: &[u8], stop: &AtomicBool) -> Result<(), ReadError> {
    let mut total = 0;
    let mut at = 0;
    while let Some(found) = find(&bytes[at..], b"stream") {
        let (before, start) = (at, at + found + b"stream".len());
        at = start;
        if stop.load(Ordering::Relaxed) {
            return Err(ReadError::too_large("streams", MAX_PDF_BYTES));
        }
        if bytes[..start].ends_with(b"endstream") {
            continue;
        }
        let data = bytes[start..].strip_prefix(b"\r").unwrap_or(&bytes[start..]);
        let data = data.strip_prefix(b"\n").unwrap_or(data);
        let length = inflated(data, MAX_PART_BYTES);
        if length > MAX_PART_BYTES {
            return Err(ReadError::too_large("stream", MAX_PART_BYTES));
        }
        // Pictures are never inflated, and those of a scanned book hold gigabytes.
        let dictionary = &bytes[before.max(start.saturating_sub(1024))..start];
        if find(dictionary, b"/Image").is_none() {
            total += length;
            let expanding = [&b"FlateDecode"[..], b"LZWDecode", b"RunLengthDecode"]
                .map(|filter| count_of(dictionary, filter));
            if expanding.iter().sum::<usize>() > 1 {
                return Err(ReadError::too_large("stream", MAX_PART_BYTES));
            }
        }
        if total > MAX_PDF_BYTES {
            return Err(ReadError::too_large("streams", MAX_PDF_BYTES));
        }
    }
    Ok(())
}

/// Whether a stream can be decoded within the limits. Where neither deflate alone nor in base 85 is used, the expansion is only estimated.
pub(super) fn check(stream: &Stream<'_>) -> Result<(), ReadError> {
    let filters = stream.filters();
    let raw = stream.raw_data();
    let expanding = filters
        .iter()
        .filter(|f| matches!(f, Filter::FlateDecode | Filter::LzwDecode | Filter::RunLengthDecode));
    let most = match (&filters[..], expanding.count()) {
        ([Filter::FlateDecode], _) => inflated(&raw, MAX_PART_BYTES),
        ([Filter::Ascii85Decode, Filter::FlateDecode], _) => inflated(&ascii85(&raw), MAX_PART_BYTES),
        (_, 0) => raw.len(),
        (_, 1) => raw.len().saturating_mul(MAX_RATIO),
        _ => usize::MAX,
    };
    if most > MAX_PART_BYTES { Err(ReadError::too_large("stream", MAX_PART_BYTES)) } else { Ok(()) }
}

/// The bytes of base 85, as far as they go. (ISO 32000-2, 7.4.3)
fn ascii85(text: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    let (mut group, mut digits) = (0_u32, 0);
    for &digit in text {
        match digit {
            b'!'..=b'u' => {
                group = group.wrapping_mul(85).wrapping_add(u32::from(digit - b'!'));
                digits += 1;
            }
            b'z' if digits == 0 => bytes.extend([0; 4]),
            b'~' => break,
            _ => {}
        }
        if digits == 5 {
            bytes.extend(group.to_be_bytes());
            (group, digits) = (0, 0);
        }
    }
    if digits > 1 {
        let padded = (digits..5).fold(group, |group, _| group.wrapping_mul(85).wrapping_add(84));
        bytes.extend(&padded.to_be_bytes()[..digits - 1]);
    }
    bytes
}

/// How many bytes these hold when inflated; those that are not deflated hold none. Counts little beyond `limit`.
fn inflated(data: &[u8], limit: usize) -> usize {
    let limit = limit as u64 + 1;
    let zlib = matches!(data, [method, flags, ..]
        if method & 0x0F == 8 && (u16::from(*method) << 8 | u16::from(*flags)) % 31 == 0);
    let count = |reader: &mut dyn Read| count(reader, limit);
    if zlib { count(&mut ZlibDecoder::new(data)) } else { count(&mut DeflateDecoder::new(data)) }
}

fn count(reader: &mut dyn Read, limit: u64) -> usize {
    let mut buffer = vec![0; 64 << 10];
    let mut total = 0;
    while total < limit {
        match reader.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(read) => total += read as u64,
        }
    }
    usize::try_from(total).unwrap_or(usize::MAX)
}

fn count_of(bytes: &[u8], word: &[u8]) -> usize {
    bytes.windows(word.len()).filter(|window| *window == word).count()
}

fn find(bytes: &[u8], word: &[u8]) -> Option<usize> {
    bytes.windows(word.len()).position(|window| window == word)
}
