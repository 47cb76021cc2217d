//! The scenarios that are known by name, and those in files.

use anyhow::{Context as _, Result, bail};
use toml::{Table, Value};

/// Name and file: a line that says what it is, and the values that differ from the options' defaults.
const PRESETS: [(&str, &str); 5] = [
    ("small-fleet", include_str!("../presets/small-fleet.toml")),
    ("smollm2-a3", include_str!("../presets/smollm2-a3.toml")),
    ("smollm2-a3-fast", include_str!("../presets/smollm2-a3-fast.toml")),
    ("smollm2-pie", include_str!("../presets/smollm2-pie.toml")),
    ("8b-a3", include_str!("../presets/8b-a3.toml")),
];

/// A scenario's values, and where they are from.
#[derive(Debug)]
pub(crate) struct Values {
    pub(crate) from: String,
    pub(crate) table: Table,
}

/// The presets, one a line, with what the first line of their file says.
pub(crate) fn list() -> String {
    let width = PRESETS.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let about = |text: &str| text.lines().next().unwrap_or_default().trim_start_matches("# ").to_owned();
    PRESETS.iter().map(|(name, text)| format!("{name:width$}  {}\n", about(text))).collect()
}

/// A preset, or a file.
///
/// # Errors
/// If there is no such preset or file, or it is not TOML.
pub(crate) fn read(name: &str) -> Result<Values> {
    if let Some(values) = preset(name)? {
        return Ok(values);
    }
    let names: Vec<&str> = PRESETS.iter().map(|(name, _)| *name).collect();
    let text = std::fs::read_to_string(name).with_context(|| {
        format!("{name} is neither a preset ({}) nor a file that can be read", names.join(", "))
    })?;
    let mut table = parse(&text, name)?;
    let Some(base) = table.remove("base") else { return Ok(Values { from: name.to_owned(), table }) };
    let Some(mut values) = base.as_str().map(preset).transpose()?.flatten() else {
        bail!("{name}: base has to be one of {}", names.join(", "));
    };
    values.table.extend(table);
    Ok(Values { from: name.to_owned(), ..values })
}

fn preset(name: &str) -> Result<Option<Values>> {
    let text = PRESETS.iter().find(|(known, _)| *known == name).map(|(_, text)| *text);
    text.map(|text| Ok(Values { from: name.to_owned(), table: parse(text, name)? })).transpose()
}

fn parse(text: &str, name: &str) -> Result<Table> {
    let table: Table = text
        .parse()
        .map_err(|error: toml::de::Error| anyhow::anyhow!("{}", error.to_string().trim_end()))
        .with_context(|| format!("{name} is not valid TOML"))?;
    // Both spellings of a key are one.
    let dashed = |(key, value): (String, Value)| (key.replace('_', "-"), value);
    Ok(table.into_iter().map(dashed).collect())
}
