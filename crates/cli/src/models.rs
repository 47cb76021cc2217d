//! `refrain models`: the models that are known by name, and what is known of them.

use anyhow::Result;
use refrain::{KNOWN, KnownModel};
use serde_json::{Value, json};

use crate::output::{print, print_json};
use crate::settings::Context;
use crate::table::Table;

/// `refrain models`
pub(crate) fn run(context: &Context) -> Result<()> {
    if context.json {
        return print_json(&KNOWN.iter().map(|known| as_json(context, known)).collect::<Vec<_>>());
    }
    let mut table = Table::new(&[
        "<name",
        "<model",
        "<weights",
        "size",
        "context",
        "<licence",
        "<method, prefix",
        "<fetched",
    ]);
    for known in KNOWN.iter() {
        let choice = match (&known.method, &known.prefix) {
            (Some(method), Some(prefix)) => format!("{method}, {prefix}"),
            _ => "not measured".to_owned(),
        };
        table.push(vec![
            known.name.clone(),
            known.title.clone(),
            known.quantization.clone(),
            known.size.clone(),
            known.context.to_string(),
            known.licence.clone(),
            choice,
            if is_fetched(context, known) { "yes" } else { "no" }.to_owned(),
        ]);
    }
    print(&table.text())?;
    context.say(
        "method, prefix: what `auto` stands for, found near the full prefill; `refrain tune` finds them for other models and \
         documents. `refrain pull NAME` fetches a model.",
    );
    Ok(())
}

fn is_fetched(context: &Context, known: &KnownModel) -> bool {
    context.models.join(&known.file).is_file()
}

fn as_json(context: &Context, known: &KnownModel) -> Value {
    json!({
        "name": known.name,
        "title": known.title,
        "quantization": known.quantization,
        "size": known.size,
        "context": known.context,
        "licence": known.licence,
        "method": known.method,
        "prefix": known.prefix,
        "sha256": known.sha256,
        "hub": known.address(),
        "path": context.models.join(&known.file),
        "fetched": is_fetched(context, known),
    })
}
