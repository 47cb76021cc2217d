//! Keywords of an answer.

use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::{PyKeyError, PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use refrain::model::Message;
use refrain::{Question, StructuredOutput};

use crate::convert::to_json;
use crate::error::RefrainError;

/// Sets what the keywords of an answer name. A keyword that is None stands for its default.
pub(crate) fn set_keywords(question: &mut Question, keywords: &Bound<'_, PyDict>) -> PyResult<()> {
    let (mut form, mut seed): (Option<String>, Option<u64>) = (None, None);
    for (name, value) in keywords {
        let name: String = name.extract()?;
        let earlier = question.output.take();
        let set = match name.as_str() {
            "seed" => given_seed(&value).map(|given| seed = given),
            _ => keyword(question, &name, &value),
        };
        set.map_err(|error| named(value.py(), &name, error))?;
        match (&form, &question.output) {
            (Some(form), Some(_)) => {
                let message = format!("{form} and {name} exclude one another: give one of them");
                return Err(PyTypeError::new_err(message));
            }
            (None, Some(_)) => form = Some(name),
            (_, None) => question.output = earlier,
        }
    }
    let sampling = &mut question.sampling;
    sampling.seed = match seed {
        Some(seed) => seed,
        None if sampling.temperature > 0.0 => random_seed()?,
        None => sampling.seed,
    };
    Ok(())
}

/// A number that cannot be negative, with the name of its argument.
pub(crate) fn count<T: TryFrom<i64>>(name: &str, value: i64) -> PyResult<T> {
    T::try_from(value)
        .map_err(|_| PyValueError::new_err(format!("{name} = {value} is out of range; choose 0 or more")))
}

/// The value of an argument, whose error names it.
pub(crate) fn argument<'py, T: FromPyObjectOwned<'py>>(name: &str, value: &Bound<'py, PyAny>) -> PyResult<T> {
    value.extract().map_err(|error| named(value.py(), name, Into::<PyErr>::into(error)))
}

/// A seed, which may be negative, as the server takes it; none with -1, for which one is drawn.
fn given_seed(value: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    match value.extract::<Option<i64>>() {
        Ok(seed) => Ok(seed.filter(|seed| *seed != -1).map(|seed| seed as u64)),
        Err(_) => value.extract(),
    }
}

/// A seed of 32 bits, which every language and file can hold.
fn random_seed() -> PyResult<u64> {
    let mut bytes = [0; 4];
    let filled = getrandom::fill(&mut bytes);
    filled.map_err(|error| RefrainError::new_err(format!("no seed can be drawn: {error}; give one")))?;
    Ok(u32::from_le_bytes(bytes).into())
}

/// Sets what a keyword names.
fn keyword(question: &mut Question, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
    let sampling = &mut question.sampling;
    match name {
        "max_tokens" => set(&mut sampling.max_tokens, value),
        "min_tokens" => set(&mut sampling.min_tokens, value),
        "temperature" => set(&mut sampling.temperature, value),
        "top_k" => {
            if let Some(top_k) = value.extract::<Option<i64>>()? {
                // -1 keeps all tokens, as in vLLM.
                sampling.top_k = if top_k == -1 { 0 } else { count("top_k", top_k)? };
            }
            Ok(())
        }
        "top_p" => {
            set(&mut sampling.top_p, value)?;
            if sampling.top_p == 0.0 {
                // 0 keeps the likeliest token alone, as in OpenAI's interface.
                sampling.top_p = f32::MIN_POSITIVE;
            }
            Ok(())
        }
        "min_p" => set(&mut sampling.min_p, value),
        "repetition_penalty" => set(&mut sampling.repetition_penalty, value),
        "frequency_penalty" => set(&mut sampling.frequency_penalty, value),
        "presence_penalty" => set(&mut sampling.presence_penalty, value),
        "logit_bias" => set(&mut sampling.logit_bias, value),
        "logprobs" => set(&mut sampling.logprobs, value),
        "stop" if value.is_instance_of::<PyString>() => {
            sampling.stop = vec![value.extract()?];
            Ok(())
        }
        "stop" => set(&mut sampling.stop, value),
        "thinking" => set(&mut question.instructions.thinking, value),
        "speculative_tokens" => set(&mut question.speculative_tokens, value),
        "ignore_eos" => set(&mut question.ignore_eos, value),
        "history" => {
            if !value.is_none() {
                question.instructions.history = history(value)?;
            }
            Ok(())
        }
        _ => {
            question.output = output(name, value)?;
            Ok(())
        }
    }
}

/// The form of the answer that a keyword gives.
fn output(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Option<StructuredOutput>> {
    Ok(match name {
        "json_object" => {
            value.extract::<Option<bool>>()?.filter(|wanted| *wanted).map(|_| StructuredOutput::JsonObject)
        }
        "json_schema" if value.is_none() => None,
        "json_schema" => Some(StructuredOutput::JsonSchema(to_json(value)?)),
        "regex" => value.extract::<Option<_>>()?.map(StructuredOutput::Regex),
        "choice" => value.extract::<Option<_>>()?.map(StructuredOutput::Choice),
        "grammar" => value.extract::<Option<_>>()?.map(StructuredOutput::Lark),
        _ => return Err(PyTypeError::new_err("there is no such keyword of an answer")),
    })
}

/// Sets a field, unless the value is None.
fn set<'py, T: FromPyObjectOwned<'py>>(field: &mut T, value: &Bound<'py, PyAny>) -> PyResult<()> {
    if !value.is_none() {
        *field = value.extract().map_err(Into::<PyErr>::into)?;
    }
    Ok(())
}

/// The error of a value, with the keyword that has it.
fn named(py: Python<'_>, name: &str, error: PyErr) -> PyErr {
    let message = format!("{name}: {}", error.value(py));
    if error.is_instance_of::<PyTypeError>(py) {
        PyTypeError::new_err(message)
    } else if error.is_instance_of::<PyValueError>(py) || error.is_instance_of::<PyOverflowError>(py) {
        PyValueError::new_err(message)
    } else {
        error
    }
}

/// Turns of a conversation.
fn history(turns: &Bound<'_, PyAny>) -> PyResult<Vec<Message>> {
    let turn = |(index, turn): (usize, PyResult<Bound<'_, PyAny>>)| {
        let turn = turn?;
        let field = |name: &str| match turn.get_item(name) {
            Ok(value) => value.extract::<String>(),
            Err(error) if error.is_instance_of::<PyKeyError>(turn.py()) => {
                Err(PyValueError::new_err(format!("turn {index} has no '{name}'")))
            }
            Err(error) => Err(error),
        };
        Ok(Message::text(&field("role")?, &field("content")?))
    };
    turns.try_iter()?.enumerate().map(turn).collect()
}
