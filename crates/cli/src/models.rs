//! `refrain models`: the models that are known by name, and what is known of them.

use anyhow::Result;
use refrain::quantities::parse_size;
use refrain::{Choice, KNOWN, KnownModel, choice, tuned_path};
use serde_json::{Value, json};

use crate::output::{json_path, print, print_json};
use crate::settings::Context;
use crate::table::Table;

/// `refrain models`
pub(crate) fn run(context: &Context) -> Result<()> {
    if context.json {
        let models = KNOWN.iter().map(|known| as_json(context, known)).collect::<Result<Vec<_>>>()?;
        return print_json(&models);
    }
    let mut table = Table::new(&["<name", "<weights", "context", "<licence", "<method and prefix", "<here"]);
    for known in KNOWN.iter() {
        let choice = match (tuned(context, known)?, &known.method, &known.prefix) {
            (Some(choice), ..) => format!("{} {} (tuned)", choice.method, choice.prefix),
            (None, Some(method), Some(prefix)) => format!("{method} {prefix}"),
            _ => "not measured".to_owned(),
        };
        table.push(vec![
            known.name.clone(),
            format!("{}, {}", known.quantization, known.size),
            known.context.to_string(),
            known.licence.clone(),
            choice,
            if is_fetched(context, known) { "yes" } else { "no" }.to_owned(),
        ]);
    }
    print(&table.text())?;
    context.say(
        "method and prefix: what `auto` stands for, found near the full prefill; `refrain tune` finds them for other models and \
         documents, and `refrain tune --forget` goes back to what is built in. here: whether the model is fetched, as `refrain pull NAME` does.",
    );
    Ok(())
}

fn is_fetched(context: &Context, known: &KnownModel) -> bool {
    context.models.join(&known.file).is_file()
}

/// The choice of `refrain tune` for a model that is fetched, which goes before the one that is built in.
fn tuned(context: &Context, known: &KnownModel) -> Result<Option<Choice>> {
    let folder = context.data_folder.as_deref();
    let has_choices = folder.is_some_and(|folder| folder.join("tuned").is_dir());
    if !has_choices || !is_fetched(context, known) {
        return Ok(None);
    }
    // A file that is no model has no choice, and keeps nobody from the list.
    let Ok(fingerprint) = context.fingerprint_of(&known.name) else { return Ok(None) };
    let mut is_used = tuned_path(folder, &fingerprint)?.exists();
    let choice = choice(&known.name, &fingerprint, folder, &mut |warning| {
        is_used = false;
        context.console.warn(warning);
    })?;
    Ok(is_used.then_some(choice))
}

/// Bytes of a model's file, rounded where it is not fetched.
fn size(context: &Context, known: &KnownModel) -> Option<u64> {
    let file = std::fs::metadata(context.models.join(&known.file));
    file.map_or_else(|_| parse_size(&known.size).ok(), |file| Some(file.len()))
}

fn as_json(context: &Context, known: &KnownModel) -> Result<Value> {
    let tuned = tuned(context, known)?;
    let (method, prefix) = match &tuned {
        Some(choice) => (Some(choice.method.clone()), Some(choice.prefix.to_string())),
        None => (known.method.clone(), known.prefix.clone()),
    };
    Ok(json!({
        "name": known.name,
        "title": known.title,
        "quantization": known.quantization,
        "size": size(context, known),
        "context": known.context,
        "licence": known.licence,
        "method": method,
        "prefix": prefix,
        "tuned": tuned.is_some(),
        "sha256": known.sha256,
        "hub": known.address(),
        "path": json_path(&context.models.join(&known.file)),
        "fetched": is_fetched(context, known),
    }))
}
