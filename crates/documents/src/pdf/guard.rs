//! Bounds on the inflated streams of a PDF: a megabyte of deflated zeros is a gigabyte.
//!
//! `hayro-syntax` inflates a stream whole, without a limit, and those that hold objects before anything can be asked. So all bytes
//! that may be compressed are counted once before, and each stream that is read afterwards has a known chain of filters.

use std::sync::atomic::{AtomicBool, Ordering};

use hayro_syntax::Filter;
use hayro_syntax::object::dict::keys::{BITS_PER_COMPONENT, COLORS, COLUMNS, DECODE_PARMS, DP, PREDICTOR};
use hayro_syntax::object::{Array, Dict, Object, Stream};

use super::expand::{ascii_hex, ascii85, lzw, run_length};
use super::inflate::deflated;
use super::names::{Name, names};
use crate::error::ReadError;
use crate::limits::{MAX_PART_BYTES, MAX_PDF_BYTES, MAX_TIME};
use crate::origin::Origin;

/// The most bytes that one byte can stand for, rounded up: in LZW, 3838 behind a code of 12 bits.
const MAX_RATIO: usize = 2600;

/// Bits of a row that a predictor works on.
const MAX_ROW_BITS: usize = 1 << 27;

/// Columns of a row, where its other sizes are not known.
const MAX_COLUMNS: u64 = 1 << 20;

const FLATE: [&str; 2] = ["FlateDecode", "Fl"];
const LZW: [&str; 2] = ["LZWDecode", "LZW"];
const RUN_LENGTH: [&str; 2] = ["RunLengthDecode", "RL"];
const ASCII85: [&str; 2] = ["ASCII85Decode", "A85"];
const ASCII_HEX: [&str; 2] = ["ASCIIHexDecode", "AHx"];

/// Bytes that end the data of a stream under each filter: in LZW and as runs they begin with a mark of the end, no text has such
/// letters, and deflated they are a block of 128 zeros and an empty last one.
const NO_DATA: [u8; 135] = {
    let mut bytes = [0; 135];
    (bytes[0], bytes[1], bytes[3], bytes[4]) = (0x80, 0x80, 0x7F, 0xFF);
    bytes[133] = 3;
    bytes
};

/// The filters beside deflate that any stream of a file may have.
#[derive(Clone, Copy, Default)]
struct Filters {
    lzw: bool,
    run_length: bool,
    ascii85: bool,
    ascii_hex: bool,
}

/// Asserts that no stream of a file holds more than the limits, as far as its bytes tell, and empties its pictures.
///
/// Names count wherever they stand: a stream that holds objects needs neither a type nor a dictionary that a search can delimit.
pub(super) fn check_streams(bytes: &mut [u8], origin: Origin, stop: &AtomicBool) -> Result<(), ReadError> {
    let filters = check_names(bytes, origin, stop)?;
    let mut region = Region::new();
    let (mut total, mut at) = (0, 0);
    while let Some(found) = find(&bytes[at..], b"stream") {
        let (before, start) = (at, at + found + b"stream".len());
        at = start;
        check_time(stop)?;
        let ends = bytes[..start].ends_with(b"endstream");
        // The word alone may stand in a comment inside a dictionary.
        if ends && region.has_data {
            region = Region::new();
            continue;
        }
        region.add(&bytes[before..start])?;
        // The data begin behind a line break; elsewhere the word stands in a text.
        if ends || !matches!(bytes.get(start), Some(b'\r' | b'\n')) {
            continue;
        }
        region.has_data = true;
        let data = bytes[start..].strip_prefix(b"\r").unwrap_or(&bytes[start..]);
        let data = data.strip_prefix(b"\n").unwrap_or(data);
        // No picture is ever inflated, and those of a scanned book hold gigabytes.
        let from = bytes.len() - data.len();
        let head = data.get(..NO_DATA.len()).filter(|head| find(head, b"stream").is_none());
        if region.picture && head.is_some() {
            bytes[from..from + NO_DATA.len()].copy_from_slice(&NO_DATA);
            continue;
        }
        let length = filters.length(data);
        if length > MAX_PART_BYTES {
            return Err(ReadError::too_large("stream", MAX_PART_BYTES));
        }
        total += length * region.weight;
        if total > MAX_PDF_BYTES {
            return Err(ReadError::too_large("streams", MAX_PDF_BYTES));
        }
    }
    if !region.has_data {
        region.add(&bytes[at..])?;
    }
    Ok(())
}

/// The error is seen by nobody: that of the time was given before.
pub(super) fn check_time(stop: &AtomicBool) -> Result<(), ReadError> {
    if stop.load(Ordering::Relaxed) { Err(ReadError::late(MAX_TIME)) } else { Ok(()) }
}

/// Finds the filters of a file, and refuses that which says too little for its streams to be bounded.
fn check_names(bytes: &mut [u8], origin: Origin, stop: &AtomicBool) -> Result<Filters, ReadError> {
    let mut filters = Filters::default();
    let (mut encrypted, mut objects, mut hidden) = (false, false, Vec::new());
    for name in names(bytes) {
        check_time(stop)?;
        filters.lzw |= name.is(&LZW);
        filters.run_length |= name.is(&RUN_LENGTH);
        filters.ascii85 |= name.is(&ASCII85);
        filters.ascii_hex |= name.is(&ASCII_HEX);
        encrypted |= name.is(&["Encrypt"]);
        objects |= name.is(&["ObjStm", "XRef"]) || name.is(&["W"]) && name.is_of_widths();
        if name.is(&["Columns"]) && name.is_number_beyond(MAX_COLUMNS) {
            return Err(ReadError::TooLarge { what: "columns of a row", limit: MAX_COLUMNS.to_string() });
        }
        if name.is(&["Filter"]) && name.is_indirect() {
            return Err(ReadError::Unsupported {
                format: "a PDF whose filters are objects of their own",
                remedy: "write it anew, for example with qpdf --recompress-flate",
            });
        }
        if name.is(&["DecodeParms", "DP"]) && name.is_indirect() {
            hidden.push(name.at + 1);
        }
    }
    // An own file is read: many that open without a password are encrypted so.
    if encrypted && objects && origin == Origin::Sent {
        return Err(ReadError::Unsupported {
            format: "a PDF whose encryption hides its objects",
            remedy: "remove the encryption, for example with qpdf --decrypt",
        });
    }
    // Parameters in another object, which may lie in a compressed stream, are renamed away: programs write them so for pictures,
    // which are not decoded.
    hidden.into_iter().for_each(|at| bytes[at] = b'-');
    Ok(filters)
}

impl Filters {
    /// The most bytes that data can hold under one of the filters, or one behind a filter of text.
    fn length(self, data: &[u8]) -> usize {
        let decoded = [self.ascii85.then(|| ascii85(data)), self.ascii_hex.then(|| ascii_hex(data))];
        let texts = decoded.iter().flatten().map(|text| self.expanded(text).max(text.len()));
        texts.fold(self.expanded(data), usize::max)
    }

    fn expanded(self, data: &[u8]) -> usize {
        let lzw = if self.lzw { lzw(data, MAX_PART_BYTES) } else { 0 };
        let run_length = if self.run_length { run_length(data, MAX_PART_BYTES) } else { 0 };
        deflated(data, MAX_PART_BYTES).max(lzw).max(run_length)
    }
}

/// The text that may belong to a stream's dictionary: that since the end of the stream before.
struct Region {
    expanding: usize,
    /// Bytes of memory that a byte of the data may take: an entry of a cross-reference stream may be a byte long, and the place of
    /// an object in a stream of objects four.
    weight: usize,
    picture: bool,
    /// The stream has begun.
    has_data: bool,
}

impl Region {
    fn new() -> Region {
        Region { expanding: 0, weight: 1, picture: false, has_data: false }
    }

    fn add(&mut self, text: &[u8]) -> Result<(), ReadError> {
        let is_expanding = |name: &Name<'_>| [FLATE, LZW, RUN_LENGTH].iter().any(|filter| name.is(filter));
        for name in names(text) {
            self.expanding += usize::from(is_expanding(&name));
            self.weight = match &*name.name {
                b"W" if name.is_of_widths() => 64,
                b"First" => self.weight.max(8),
                _ => self.weight,
            };
        }
        if self.expanding > 1 {
            return Err(ReadError::too_large("stream", MAX_PART_BYTES));
        }
        let object = text.windows(3).rposition(|word| word == b"obj").unwrap_or_default();
        self.picture =
            names(&text[object..]).any(|name| name.is(&["Subtype"]) && name.is_followed_by("Image"));
        Ok(())
    }
}

/// The bytes that a stream holds at most, if these and its parameters are within the limits.
pub(super) fn check(stream: &Stream<'_>) -> Result<usize, ReadError> {
    parameters(stream.dict()).iter().try_for_each(check_row)?;
    let filters = stream.filters();
    let mut raw = stream.raw_data().into_owned();
    let mut chain = &filters[..];
    loop {
        raw = match chain.first() {
            Some(Filter::Ascii85Decode) => ascii85(&raw),
            Some(Filter::AsciiHexDecode) => ascii_hex(&raw),
            Some(Filter::Crypt) => raw,
            _ => break,
        };
        chain = &chain[1..];
    }
    let length = match chain {
        [] => raw.len(),
        [Filter::FlateDecode] => deflated(&raw, MAX_PART_BYTES),
        [Filter::LzwDecode] => lzw(&raw, MAX_PART_BYTES),
        [Filter::RunLengthDecode] => run_length(&raw, MAX_PART_BYTES),
        chain => estimate(chain, raw.len()),
    };
    if length > MAX_PART_BYTES { Err(ReadError::too_large("stream", MAX_PART_BYTES)) } else { Ok(length) }
}

/// The most bytes that any data of a length can hold under a chain of filters.
fn estimate(chain: &[Filter], length: usize) -> usize {
    chain.iter().fold(length, |length, filter| match filter {
        Filter::FlateDecode | Filter::LzwDecode | Filter::RunLengthDecode => length.saturating_mul(MAX_RATIO),
        // A letter stands for four zeros.
        Filter::Ascii85Decode => length.saturating_mul(4),
        _ => length,
    })
}

/// The parameters of a stream's filters.
fn parameters<'a>(dict: &Dict<'a>) -> Vec<Dict<'a>> {
    let of = |key: &[u8]| {
        let array = dict.get::<Array<'a>>(key).unwrap_or_default();
        let mut items = array.iter::<Object<'a>>();
        // An item that refers to nothing ends the items no more than it does when they are read.
        let several = array.raw_iter().filter_map(|_| items.next()?.into_dict());
        dict.get::<Dict<'a>>(key).into_iter().chain(several).collect::<Vec<_>>()
    };
    [of(DP), of(DECODE_PARMS)].concat()
}

/// A predictor allocates a row before it reads one.
fn check_row(parameters: &Dict<'_>) -> Result<(), ReadError> {
    if parameters.get::<u8>(PREDICTOR).unwrap_or(1) == 1 {
        return Ok(());
    }
    let columns = parameters.get::<usize>(COLUMNS).unwrap_or(1);
    let colors = parameters.get::<u8>(COLORS).unwrap_or(1);
    let bits = parameters.get::<u8>(BITS_PER_COMPONENT).unwrap_or(8);
    let row = columns.checked_mul(usize::from(colors)).and_then(|row| row.checked_mul(usize::from(bits)));
    if row.is_none_or(|row| row > MAX_ROW_BITS) {
        return Err(ReadError::too_large("row of a stream", MAX_ROW_BITS / 8));
    }
    Ok(())
}

pub(super) fn find(bytes: &[u8], word: &[u8]) -> Option<usize> {
    bytes.windows(word.len()).position(|window| window == word)
}
