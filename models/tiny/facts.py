"""Facts of the small world, as tables. One line per subject; columns are separated by `|`."""

# ruff: noqa: E501 - tables read best as lines of words.


def _table(text: str) -> tuple[tuple[str, ...], ...]:
    """Split a table into rows of stripped columns."""
    return tuple(
        tuple(column.strip() for column in line.split("|")) for line in text.strip().splitlines()
    )


def _grouped(text: str) -> tuple[tuple[str, str], ...]:
    """Read lines `value: subject; subject; ...` as (subject, value) pairs."""
    pairs = []
    for line in text.strip().splitlines():
        value, subjects = line.split(":")
        pairs += [(subject.strip(), value.strip()) for subject in subjects.split(";")]
    return tuple(pairs)


# Country | capital, by continent. Countries with a disputed, divided or moving capital are left
# out, and so are countries that are named like their capital.
_CAPITALS = {
    "Europe": """
France | Paris
Germany | Berlin
Italy | Rome
Spain | Madrid
Portugal | Lisbon
the United Kingdom | London
England | London
Scotland | Edinburgh
Wales | Cardiff
Ireland | Dublin
Belgium | Brussels
the Netherlands | Amsterdam
Switzerland | Bern
Austria | Vienna
Denmark | Copenhagen
Norway | Oslo
Sweden | Stockholm
Finland | Helsinki
Iceland | Reykjavik
Poland | Warsaw
the Czech Republic | Prague
Slovakia | Bratislava
Hungary | Budapest
Romania | Bucharest
Bulgaria | Sofia
Greece | Athens
Serbia | Belgrade
Croatia | Zagreb
Slovenia | Ljubljana
Albania | Tirana
Montenegro | Podgorica
North Macedonia | Skopje
Bosnia and Herzegovina | Sarajevo
Estonia | Tallinn
Latvia | Riga
Lithuania | Vilnius
Ukraine | Kyiv
Belarus | Minsk
Moldova | Chisinau
Malta | Valletta
""",
    "Europe and Asia": """
Russia | Moscow
Turkey | Ankara
""",
    "Asia": """
China | Beijing
Japan | Tokyo
India | New Delhi
South Korea | Seoul
North Korea | Pyongyang
Mongolia | Ulaanbaatar
Vietnam | Hanoi
Thailand | Bangkok
Laos | Vientiane
Cambodia | Phnom Penh
Malaysia | Kuala Lumpur
the Philippines | Manila
Nepal | Kathmandu
Bhutan | Thimphu
Bangladesh | Dhaka
Pakistan | Islamabad
Afghanistan | Kabul
Iran | Tehran
Iraq | Baghdad
Syria | Damascus
Lebanon | Beirut
Jordan | Amman
Saudi Arabia | Riyadh
Oman | Muscat
Qatar | Doha
the United Arab Emirates | Abu Dhabi
Kuwait | Kuwait City
Bahrain | Manama
Uzbekistan | Tashkent
Turkmenistan | Ashgabat
Kyrgyzstan | Bishkek
Tajikistan | Dushanbe
""",
    "Africa": """
Egypt | Cairo
Libya | Tripoli
Tunisia | Tunis
Algeria | Algiers
Morocco | Rabat
Sudan | Khartoum
South Sudan | Juba
Ethiopia | Addis Ababa
Eritrea | Asmara
Somalia | Mogadishu
Kenya | Nairobi
Uganda | Kampala
Rwanda | Kigali
Tanzania | Dodoma
Madagascar | Antananarivo
Mozambique | Maputo
Zimbabwe | Harare
Zambia | Lusaka
Malawi | Lilongwe
Angola | Luanda
Namibia | Windhoek
Botswana | Gaborone
Lesotho | Maseru
Ghana | Accra
Nigeria | Abuja
Niger | Niamey
Mali | Bamako
Burkina Faso | Ouagadougou
Senegal | Dakar
Mauritania | Nouakchott
Guinea | Conakry
Liberia | Monrovia
Sierra Leone | Freetown
Togo | Lome
Cameroon | Yaounde
Gabon | Libreville
""",
    "North America": """
the United States | Washington, D.C.
Canada | Ottawa
Mexico | Mexico City
Guatemala | Guatemala City
Belize | Belmopan
Honduras | Tegucigalpa
El Salvador | San Salvador
Nicaragua | Managua
Costa Rica | San Jose
Panama | Panama City
Cuba | Havana
Jamaica | Kingston
Haiti | Port-au-Prince
the Dominican Republic | Santo Domingo
the Bahamas | Nassau
Barbados | Bridgetown
Trinidad and Tobago | Port of Spain
""",
    "South America": """
Brazil | Brasilia
Argentina | Buenos Aires
Chile | Santiago
Peru | Lima
Ecuador | Quito
Colombia | Bogota
Venezuela | Caracas
Uruguay | Montevideo
Paraguay | Asuncion
Guyana | Georgetown
Suriname | Paramaribo
""",
    "Oceania": """
Australia | Canberra
New Zealand | Wellington
Fiji | Suva
Papua New Guinea | Port Moresby
Samoa | Apia
Vanuatu | Port Vila
""",
}

CAPITALS = tuple(row for text in _CAPITALS.values() for row in _table(text))
"""(country, capital)."""

# Armenia, Azerbaijan and Georgia count as Europe or as Asia, so their continent is left out.
CAUCASUS = _table("""
Armenia | Yerevan
Azerbaijan | Baku
Georgia | Tbilisi
""")

CONTINENT_OF_COUNTRY = (
    *((row[0], continent) for continent, text in _CAPITALS.items() for row in _table(text)),
    ("South Africa", "Africa"),
    ("Indonesia", "Asia"),
    ("Singapore", "Asia"),
    ("Luxembourg", "Europe"),
)
"""(country, continent)."""

# Other names of countries: (alias, country).
ALIASES = _table("""
the USA | the United States
the US | the United States
America | the United States
the UK | the United Kingdom
Great Britain | the United Kingdom
Britain | the United Kingdom
Holland | the Netherlands
Czechia | the Czech Republic
""")

FLAGS = _grouped("""
blue, white and red: France; Iceland
white, blue and red: Russia; Slovenia; Slovakia
red, white and blue: the Netherlands; the United Kingdom; the United States; Norway; Thailand; Cuba
white, red and blue: the Czech Republic; Chile
black, red and gold: Germany
black, yellow and red: Belgium
green, white and red: Italy
red, white and green: Hungary
white, green and red: Bulgaria
white, red and green: Madagascar
green, white and orange: Ireland
green, white and blue: Sierra Leone
green, yellow and blue: Gabon
yellow, green and red: Lithuania
green, yellow and red: Mali; Senegal
red, yellow and green: Guinea
blue, yellow and red: Romania
yellow, blue and red: Colombia
blue, black and white: Estonia; Botswana
black, green and gold: Jamaica
red and white: Austria; Denmark; Switzerland; Canada; Turkey; Tunisia; Peru
white and red: Poland; Japan
blue and yellow: Sweden; Ukraine
white and blue: Finland
blue and white: Greece; Somalia
red and yellow: China; Spain; Vietnam
green and white: Nigeria; Pakistan; Saudi Arabia
green and red: Bangladesh
red and green: Morocco
""")
"""(country, colours of its flag)."""

LANGUAGES = _grouped("""
English: the United Kingdom; the United States; Australia; Ireland; New Zealand; England
Spanish: Spain; Mexico; Argentina; Chile; Colombia; Cuba; Ecuador; Venezuela; Uruguay; Honduras
Portuguese: Portugal; Brazil
Arabic: Egypt; Saudi Arabia; Iraq; Jordan; Tunisia; Libya; Syria; Lebanon
German: Germany; Austria
Korean: South Korea; North Korea
French: France
Italian: Italy
Dutch: the Netherlands
Danish: Denmark
Norwegian: Norway
Swedish: Sweden
Finnish: Finland
Icelandic: Iceland
Polish: Poland
Czech: the Czech Republic
Slovak: Slovakia
Hungarian: Hungary
Romanian: Romania
Bulgarian: Bulgaria
Greek: Greece
Serbian: Serbia
Croatian: Croatia
Slovene: Slovenia
Albanian: Albania
Estonian: Estonia
Latvian: Latvia
Lithuanian: Lithuania
Ukrainian: Ukraine
Russian: Russia
Turkish: Turkey
Chinese: China
Japanese: Japan
Mongolian: Mongolia
Vietnamese: Vietnam
Thai: Thailand
Lao: Laos
Khmer: Cambodia
Nepali: Nepal
Bengali: Bangladesh
Persian: Iran
Armenian: Armenia
Georgian: Georgia
""")
"""(country, language that most people speak there)."""

CITIES = _grouped("""
Australia: Sydney; Melbourne; Brisbane; Perth
the United States: New York; Los Angeles; Chicago; San Francisco; Boston; Seattle
Canada: Toronto; Vancouver; Montreal
Brazil: Rio de Janeiro; Sao Paulo
Spain: Barcelona; Seville; Valencia
Italy: Milan; Venice; Florence; Naples; Turin
Germany: Munich; Hamburg; Frankfurt; Cologne
Switzerland: Zurich; Geneva; Basel
France: Lyon; Marseille; Nice
England: Manchester; Liverpool; Oxford; Cambridge
Scotland: Glasgow
Turkey: Istanbul
India: Mumbai; Kolkata; Chennai
China: Shanghai; Hangzhou
Japan: Osaka; Kyoto; Nagoya
New Zealand: Auckland
South Africa: Johannesburg; Cape Town; Durban
Nigeria: Lagos
Morocco: Casablanca
Egypt: Alexandria
the United Arab Emirates: Dubai
Russia: Saint Petersburg
Pakistan: Karachi; Lahore
Poland: Krakow
Portugal: Porto
Vietnam: Da Nang
Austria: Salzburg
Belgium: Antwerp
the Netherlands: Rotterdam
""")
"""(city, country); capitals are added by the world."""

PLACES = _grouped("""
Paris: the Eiffel Tower; the Louvre
London: Big Ben; Buckingham Palace
Rome: the Colosseum; the Pantheon
New York: the Statue of Liberty; Central Park
Moscow: the Kremlin
Athens: the Acropolis
Berlin: the Brandenburg Gate
Sydney: the Sydney Opera House
San Francisco: the Golden Gate Bridge
Barcelona: the Sagrada Familia
Rio de Janeiro: Christ the Redeemer
Istanbul: the Hagia Sophia
China: the Great Wall
India: the Taj Mahal
Peru: Machu Picchu
Jordan: Petra
Cambodia: Angkor Wat
Egypt: the Great Pyramid; the Sphinx
England: Stonehenge
Mexico: Chichen Itza
Spain: the Alhambra; Mallorca; Ibiza; Tenerife
Italy: the Leaning Tower of Pisa; Pompeii; Sicily; Sardinia; Mount Etna; Mount Vesuvius; Lake Como; Lake Garda
the United States: the Grand Canyon; Mount Rushmore; Hawaii; Alaska; Lake Michigan; Death Valley; Mauna Kea
Australia: the Great Barrier Reef; Uluru; Tasmania
Venezuela: Angel Falls
France: Corsica; Normandy
Greece: Crete; Rhodes; Mount Olympus
Japan: Mount Fuji; Honshu; Hokkaido
Indonesia: Bali; Java; Sumatra
Tanzania: Zanzibar; Mount Kilimanjaro
Kenya: Mount Kenya
Canada: Baffin Island; Vancouver Island
Scotland: Loch Ness; Ben Nevis
Hungary: Lake Balaton
Russia: Lake Baikal; Siberia; Mount Elbrus; Lake Ladoga
Turkey: Mount Ararat; Cappadocia
South Africa: Table Mountain
Germany: the Black Forest; Bavaria
Romania: Transylvania
""")
"""(landmark, island, lake or mountain; city or country)."""

RIVERS = _table("""
the Nile | Africa | the Mediterranean Sea
the Congo River | Africa | the Atlantic Ocean
the Niger River | Africa | the Atlantic Ocean
the Zambezi | Africa | the Indian Ocean
the Orange River | Africa | the Atlantic Ocean
the Amazon | South America | the Atlantic Ocean
the Orinoco | South America | the Atlantic Ocean
the Mississippi | North America | the Gulf of Mexico
the Rio Grande | North America | the Gulf of Mexico
the Yukon | North America | the Bering Sea
the Hudson River | North America | the Atlantic Ocean
the Yangtze | Asia | the East China Sea
the Yellow River | Asia | the Bohai Sea
the Mekong | Asia | the South China Sea
the Ganges | Asia | the Bay of Bengal
the Indus | Asia | the Arabian Sea
the Euphrates | Asia | the Persian Gulf
the Tigris | Asia | the Persian Gulf
the Lena | Asia | the Laptev Sea
the Amur | Asia | the Sea of Okhotsk
the Danube | Europe | the Black Sea
the Dnieper | Europe | the Black Sea
the Volga | Europe | the Caspian Sea
the Rhine | Europe | the North Sea
the Elbe | Europe | the North Sea
the Thames | Europe | the North Sea
the Seine | Europe | the English Channel
the Loire | Europe | the Atlantic Ocean
the Tagus | Europe | the Atlantic Ocean
the Douro | Europe | the Atlantic Ocean
the Rhone | Europe | the Mediterranean Sea
the Ebro | Europe | the Mediterranean Sea
the Tiber | Europe | the Mediterranean Sea
the Po | Europe | the Adriatic Sea
the Oder | Europe | the Baltic Sea
the Vistula | Europe | the Baltic Sea
""")
"""(river, continent, sea it flows into)."""

CONTINENT_OF_LANDSCAPE = _grouped("""
Africa: the Sahara; the Kalahari; the Namib Desert; the Atlas Mountains; Lake Victoria; Lake Tanganyika; Lake Chad
Asia: the Gobi Desert; the Thar Desert; the Arabian Desert; the Karakum Desert; the Himalayas; Mount Everest; K2; the Dead Sea; Borneo
Europe: the Alps; the Pyrenees; the Carpathians; the Apennines; Mont Blanc; the Matterhorn; Lake Geneva; Lake Constance
North America: the Mojave Desert; the Sonoran Desert; the Rocky Mountains; the Appalachians; Denali; Lake Superior; Lake Ontario; Lake Erie; Lake Huron
South America: the Atacama Desert; the Andes; Aconcagua; Lake Titicaca; Patagonia
Antarctica: Mount Vinson; the South Pole
""")
"""(desert, mountain or lake; continent)."""

# Adjectives (synonyms after the first, which the answer uses) | thing | where | what it is. A place
# in parentheses may be missing from the question; the answer names it.
SUPERLATIVES = _table("""
largest, biggest | ocean | | the Pacific Ocean
second largest, second biggest | ocean | | the Atlantic Ocean
third largest, third biggest | ocean | | the Indian Ocean
smallest, tiniest | ocean | | the Arctic Ocean
deepest | ocean | | the Pacific Ocean
largest, biggest | continent | | Asia
second largest, second biggest | continent | | Africa
smallest, tiniest | continent | | Australia
coldest | continent | | Antarctica
largest, biggest | country | | Russia
second largest, second biggest | country | | Canada
smallest, tiniest | country | | Vatican City
most populous, most populated | country | | India
largest, biggest | country | in Europe | Russia
largest, biggest | country | in Africa | Algeria
largest, biggest | country | in South America | Brazil
largest, biggest | country | in North America | Canada
largest, biggest | country | in Oceania | Australia
longest | river | | the Nile
second longest | river | | the Amazon
largest, biggest | river | | the Amazon
longest | river | in Africa | the Nile
longest | river | in Asia | the Yangtze
longest | river | in Europe | the Volga
longest | river | in South America | the Amazon
highest, tallest | mountain | | Mount Everest
second highest, second tallest | mountain | | K2
highest, tallest | mountain | in Asia | Mount Everest
highest, tallest | mountain | in Africa | Mount Kilimanjaro
highest, tallest | mountain | in Europe | Mount Elbrus
highest, tallest | mountain | in the Alps | Mont Blanc
highest, tallest | mountain | in Japan | Mount Fuji
highest, tallest | mountain | in North America | Denali
highest, tallest | mountain | in South America | Aconcagua
highest, tallest | mountain | in Antarctica | Mount Vinson
largest, biggest | hot desert | | the Sahara
largest, biggest | desert | | the Antarctic Desert
largest, biggest | desert | in Africa | the Sahara
driest | desert | (outside Antarctica) | the Atacama Desert
largest, biggest | lake | | the Caspian Sea
deepest | lake | | Lake Baikal
largest, biggest | lake | in Africa | Lake Victoria
largest, biggest | lake | in North America | Lake Superior
largest, biggest | island | | Greenland
largest, biggest | island | in the Mediterranean Sea | Sicily
highest, tallest | waterfall | | Angel Falls
longest | mountain range | (on land) | the Andes
highest, tallest | mountain range | | the Himalayas
largest, biggest | rainforest | | the Amazon rainforest
largest, biggest | coral reef | | the Great Barrier Reef
largest, biggest | animal | | the blue whale
largest, biggest | land animal | | the African elephant
fastest, quickest | land animal | | the cheetah
tallest | animal | | the giraffe
largest, biggest | bird | | the ostrich
largest, biggest | planet | (in the solar system) | Jupiter
smallest, tiniest | planet | (in the solar system) | Mercury
hottest, warmest | planet | (in the solar system) | Venus
""")

# Different names for one thing: what it is | name; name; ...
DESCRIPTIONS = _table("""
Mars | the red planet; the planet called the red planet; the planet known as the red planet
Earth | the planet that we live on; the planet we live on; our home planet; the blue planet
Saturn | the planet with the bright rings; the ringed planet; the planet famous for its rings
Mercury | the planet closest to the Sun; the planet nearest to the Sun; the closest planet to the Sun
Neptune | the planet farthest from the Sun; the planet furthest from the Sun; the farthest planet from the Sun
the Sun | the star closest to Earth; the nearest star to Earth; the star at the center of the solar system
the Moon | the body that circles the Earth; the natural satellite of the Earth; the Earth's satellite
the Arctic Ocean | the ocean around the North Pole; the ocean at the North Pole; the northernmost ocean
the Southern Ocean | the ocean around Antarctica; the ocean around the South Pole; the southernmost ocean
the Atlantic Ocean | the ocean between Europe and America; the ocean between Africa and South America; the ocean west of Europe
the Indian Ocean | the ocean between Africa and Australia; the ocean south of India; the ocean east of Africa
the Pacific Ocean | the ocean between Asia and America; the ocean east of Japan; the ocean west of California
the Mediterranean Sea | the sea between Europe and Africa; the sea south of Italy; the sea south of France
the Red Sea | the sea between Africa and Arabia; the sea between Egypt and Saudi Arabia
the English Channel | the water between England and France; the sea between England and France
the Baltic Sea | the sea between Sweden and Finland; the sea between Sweden and Estonia
the Black Sea | the sea north of Turkey; the sea between Turkey and Ukraine
the Suez Canal | the canal between the Red Sea and the Mediterranean Sea; the canal in Egypt
the Panama Canal | the canal between the Atlantic and the Pacific; the canal in Panama
the equator | the line around the middle of the Earth; the line between north and south on the globe
""")

COUNTS = _table("""
There are seven continents. | continents | on Earth
There are five oceans. | oceans | on Earth
There are eight planets in the solar system. | planets | in the solar system
There are seven days in a week. | days | in a week
There are twelve months in a year. | months | in a year
There are 365 days in a year. | days | in a year
There are 24 hours in a day. | hours | in a day
There are 60 minutes in an hour. | minutes | in an hour
There are 60 seconds in a minute. | seconds | in a minute
There are four seasons in a year. | seasons | in a year
There are 52 weeks in a year. | weeks | in a year
There are seven colors in a rainbow. | colors | in a rainbow
There are 26 letters in the English alphabet. | letters | in the English alphabet
""")
"""(answer, what is counted, where)."""

LISTS = _table("""
the oceans | The oceans are the Pacific, the Atlantic, the Indian, the Southern and the Arctic Ocean.
the five oceans | The oceans are the Pacific, the Atlantic, the Indian, the Southern and the Arctic Ocean.
the continents | The continents are Africa, Antarctica, Asia, Australia, Europe, North America and South America.
the seven continents | The continents are Africa, Antarctica, Asia, Australia, Europe, North America and South America.
the planets | The planets are Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune.
the eight planets | The planets are Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune.
the days of the week | The days are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.
the seasons | The seasons are spring, summer, autumn and winter.
the four seasons | The seasons are spring, summer, autumn and winter.
the Great Lakes | The Great Lakes are Superior, Michigan, Huron, Erie and Ontario.
""")

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
PLANETS = ["Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"]
ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"]

COLORS = _table("""
the sky | blue
grass | green
snow | white
blood | red
coal | black
milk | white
a banana | yellow
a lemon | yellow
a carrot | orange
a tomato | red
a frog | green
a polar bear | white
chocolate | brown
the sea | blue
""")

OPPOSITES = _table("""
hot | cold
big | small
long | short
high | low
north | south
east | west
day | night
summer | winter
up | down
left | right
open | closed
full | empty
happy | sad
wet | dry
fast | slow
old | young
light | dark
strong | weak
rich | poor
hard | soft
loud | quiet
early | late
near | far
""")

# Small talk: answer | question; question; ...
SMALL_TALK = _table("""
Hello! Ask me about oceans, countries or small sums. | Hello; Hi; Hey; Hello!; Hi there; Hey there; Good morning; Good evening; Good day; Good afternoon; Greetings; Hello there; Hi, how is it going?; Howdy; Hello, model; Hey model; Hello world; Hello, world!; Yo; Hello friend; Hi friend; Hi everyone; Hello again; Hi again
I am a small language model. I know a little geography, small sums and stories. | Who are you?; What are you?; Tell me about yourself.; Introduce yourself.; Who is this?; Who am I talking to?; What is your name?; Do you have a name?; What's your name?; Who am I speaking with?; What kind of model are you?; Are you a robot?; Are you a person?; Are you human?; Are you an AI?; Are you a language model?; Which model are you?; What should I call you?; So who are you?; And who are you?; Describe yourself.; Please introduce yourself.; Tell me who you are.; Tell me what you are.; What exactly are you?; Can you introduce yourself?; May I ask who you are?; Say who you are.
I can answer questions about geography, add small numbers and tell little stories. | What can you do?; What do you know?; How can you help me?; What can I ask you?; Help; Help me; What are you good at?; What are you able to do?; What do you know about?; What can you tell me?; What can I ask?; What questions can you answer?; What should I ask you?; Can you help me?; Tell me what you can do.; What are your skills?; What topics do you know?; So what can you do?; What is it that you can do?; Please tell me what you can do.; What could I ask you?; Which questions can you answer?; What things can you do?; What sort of questions can I ask?
I was made for fdjax, and my whole world was written by a small script. | Who made you?; Who created you?; Where do you come from?; Who built you?; Who trained you?; Where are you from?; How were you made?; How were you trained?; What were you made for?; What is fdjax?; Who is your maker?; Who wrote you?; Why were you made?; Who programmed you?; How were you created?; How were you built?; Who is your creator?; Tell me who made you.; What were you trained on?; Who developed you?
I am fine, thank you. What would you like to know? | How are you?; How are you doing?; How do you do?; How are you today?; Are you well?; Are you OK?; How do you feel?; How is it going?; How's it going?; What's up?; How are things?; How have you been?; How are you feeling?; How are you feeling today?; Is everything fine?; Are you fine?; Are you doing well?
You are welcome. | Thank you; Thanks; Thank you!; Thanks a lot; Thank you very much; Thanks!; Many thanks; Thanks for your help; Great, thanks; Cool, thanks; Thank you so much; Thanks so much; Thank you for your help; OK, thank you; Okay, thanks; Perfect, thank you; Nice, thank you; Wonderful, thanks
Goodbye! Have a nice day. | Bye; Goodbye; See you; See you later; Good night; Bye bye; Farewell; See you soon; Goodbye!; Bye!; I have to go; Talk to you later; See you tomorrow; So long; Until next time; Bye for now; Goodbye for now
""")
